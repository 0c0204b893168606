// Trains a step folder in onnxruntime, with the package microsoft/onnxruntime-swift-package-manager:
//
//     swift run train run/step run/
//
// As train.c (see docs/how-to/loops.md).

import Foundation
import OnnxRuntimeBindings

let batchSize = 16
let epochs = 5

struct Spec: Decodable {
  enum Size: Decodable {  // a number, or the name of a size that is open
    case known(Int), open

    init(from decoder: Decoder) throws {
      let value = try decoder.singleValueContainer()
      self = (try? value.decode(Int.self)).map(Size.known) ?? .open
    }
  }

  let name: String
  let dtype: String
  let shape: [Size]
  let next: String?
  let kind: String?
}

struct Manifest: Decodable {
  let inputs, targets, state: [Spec]
  let hyperparameters: [String: Float]
  let averages: [String: String]?
  let loss_output: String
}

/// An input or target: all its rows.
struct Column {
  let spec: Spec
  let element: ORTTensorElementDataType
  let sizes: [Int]
  let rowBytes: Int
  let rows: Data

  init(_ spec: Spec, in folder: URL) throws {
    guard spec.dtype == "float32" || spec.dtype == "int64" else { fatalError("this loop feeds no \(spec.dtype)") }
    self.spec = spec
    element = spec.dtype == "int64" ? .int64 : .float
    sizes = spec.shape.dropFirst().map { if case .known(let size) = $0 { return size } else { return 1 } }
    rowBytes = sizes.reduce(spec.dtype == "int64" ? 8 : 4, *)
    rows = try Data(contentsOf: folder.appendingPathComponent("\(spec.name).bin"))
  }

  func batch(from begin: Int) throws -> ORTValue {
    let part = rows.subdata(in: begin * rowBytes..<(begin + batchSize) * rowBytes)
    let shape = ([batchSize] + sizes).map { NSNumber(value: $0) }
    return try ORTValue(tensorData: NSMutableData(data: part), elementType: element, shape: shape)
  }
}

/// Feeds each input from the tensor of its name; gives the outputs by name.
func run(_ session: ORTSession, _ known: [String: ORTValue]) throws -> [String: ORTValue] {
  let names = Set(try session.inputNames())
  return try session.run(
    withInputs: known.filter { names.contains($0.key) }, outputNames: Set(try session.outputNames()), runOptions: nil)
}

func number(_ value: ORTValue) throws -> Float {
  (try value.tensorData() as Data).withUnsafeBytes { $0.load(as: Float.self) }
}

let folder = URL(fileURLWithPath: CommandLine.arguments[1])
let data = URL(fileURLWithPath: CommandLine.arguments[2])
let manifest = try JSONDecoder().decode(
  Manifest.self, from: Data(contentsOf: folder.appendingPathComponent("manifest.json")))
let environment = try ORTEnv(loggingLevel: .warning)
func open(_ name: String) throws -> ORTSession {
  try ORTSession(env: environment, modelPath: folder.appendingPathComponent(name).path, sessionOptions: nil)
}
let (start, train, eval) = (try open("init.onnx"), try open("train.onnx"), try open("eval.onnx"))
let columns = try (manifest.inputs + manifest.targets).map { try Column($0, in: data) }
let rows = columns[0].rows.count / columns[0].rowBytes
for column in columns where column.rows.count != rows * column.rowBytes {
  fatalError("\(column.spec.name).bin has not as many rows as the first input")
}

var known = try run(start, [:])  // batch, hyperparameters and state, by name
for (name, rate) in manifest.hyperparameters {
  var value = rate
  let bytes = NSMutableData(bytes: &value, length: MemoryLayout<Float>.size)
  known[name] = try ORTValue(tensorData: bytes, elementType: .float, shape: [])
}
func feed(_ begin: Int) throws {
  for column in columns { known[column.spec.name] = try column.batch(from: begin) }
}

for _ in 0..<epochs {
  for begin in stride(from: 0, through: rows - batchSize, by: batchSize) {
    try feed(begin)
    let found = try run(train, known)
    print(String(format: "%.6f", try number(found[manifest.loss_output]!)))
    for spec in manifest.state { known[spec.name] = found[spec.next!] }
  }
}
try feed(0)
var used = known  // averages in place of weights, where the optimizer keeps some
for (name, average) in manifest.averages ?? [:] { used[name] = known[average] }
print(String(format: "eval %.6f", try number(run(eval, used)[manifest.loss_output]!)))

var weights = Data()
for spec in manifest.state where spec.kind == "parameter" {
  weights.append(try used[spec.name]!.tensorData() as Data)
}
try weights.write(to: data.appendingPathComponent("weights.bin"))
