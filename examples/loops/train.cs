// Trains a step folder in onnxruntime, with the package Microsoft.ML.OnnxRuntime:
//
//     dotnet new console -o train && cd train && dotnet add package Microsoft.ML.OnnxRuntime
//     cp ../train.cs Program.cs && dotnet run -- ../run/step ../run
//
// As train.c (see docs/how-to/loops.md).

using System.Globalization;
using System.Runtime.InteropServices;
using System.Text.Json;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;

const int Batch = 16, Epochs = 5;
var (folder, data) = (args[0], args[1]);
CultureInfo.CurrentCulture = CultureInfo.InvariantCulture;

using var document = JsonDocument.Parse(File.ReadAllText(Path.Combine(folder, "manifest.json")));
var manifest = document.RootElement;
var states = manifest.GetProperty("state").EnumerateArray().ToList();
var loss = Text(manifest, "loss_output");
using var init = new InferenceSession(Path.Combine(folder, "init.onnx"));
using var train = new InferenceSession(Path.Combine(folder, "train.onnx"));
using var eval = new InferenceSession(Path.Combine(folder, "eval.onnx"));
using var options = new RunOptions();

var columns = manifest.GetProperty("inputs").EnumerateArray().Concat(manifest.GetProperty("targets").EnumerateArray())
    .Select(ReadColumn).ToList();
var rows = columns[0].Rows.Length / columns[0].RowBytes;
if (columns.Find(c => c.Rows.Length != rows * c.RowBytes) is { } odd)
    throw new InvalidDataException($"{odd.Name}.bin has not as many rows as the first input");

// batch, hyperparameters and state, by name
var known = Run(init, new Dictionary<string, OrtValue>());
foreach (var rate in manifest.GetProperty("hyperparameters").EnumerateObject())
    known[rate.Name] = OrtValue.CreateTensorValueFromMemory(new[] { rate.Value.GetSingle() }, Array.Empty<long>());

for (var epoch = 0; epoch < Epochs; epoch++)
{
    for (var begin = 0; begin + Batch <= rows; begin += Batch)
    {
        Feed(begin);
        var found = Run(train, known);
        Console.WriteLine($"{found[loss].GetTensorDataAsSpan<float>()[0]:F6}");
        foreach (var s in states)
        {
            found.Remove(Text(s, "next"), out var next);
            known[Text(s, "name")].Dispose();
            known[Text(s, "name")] = next!;
        }
        foreach (var rest in found.Values) rest.Dispose();
    }
}
Feed(0);
var used = new Dictionary<string, OrtValue>(known); // averages in place of weights, where the optimizer keeps some
if (manifest.TryGetProperty("averages", out var averages))
    foreach (var pair in averages.EnumerateObject()) used[pair.Name] = known[pair.Value.GetString()!];
Console.WriteLine($"eval {Run(eval, used)[loss].GetTensorDataAsSpan<float>()[0]:F6}");

using var weights = File.Create(Path.Combine(data, "weights.bin"));
foreach (var s in states.Where(s => Text(s, "kind") == "parameter"))
    weights.Write(MemoryMarshal.AsBytes(used[Text(s, "name")].GetTensorDataAsSpan<float>()));

string Text(JsonElement of, string name) => of.GetProperty(name).GetString()!;

// Feeds each input from the tensor of its name; gives the outputs by name.
Dictionary<string, OrtValue> Run(InferenceSession session, Dictionary<string, OrtValue> from)
{
    var fed = session.InputNames.ToDictionary(name => name, name => from[name]);
    var given = session.Run(options, fed, session.OutputNames);
    return session.OutputNames.Zip(given).ToDictionary(pair => pair.First, pair => pair.Second);
}

Column ReadColumn(JsonElement spec)
{
    var dtype = Text(spec, "dtype");
    if (dtype is not ("float32" or "int64")) throw new NotSupportedException($"this loop feeds no {dtype}");
    var sizes = spec.GetProperty("shape").EnumerateArray().Skip(1).Select(d => d.GetInt64()).ToList();
    var bytes = sizes.Aggregate(dtype == "int64" ? 8 : 4, (product, size) => product * (int)size);
    var content = File.ReadAllBytes(Path.Combine(data, Text(spec, "name") + ".bin"));
    return new Column(Text(spec, "name"), dtype, sizes.Prepend(Batch).ToArray(), bytes, content);
}

void Feed(int begin)
{
    foreach (var c in columns)
    {
        var part = c.Rows.AsSpan(begin * c.RowBytes, Batch * c.RowBytes);
        if (known.TryGetValue(c.Name, out var old)) old.Dispose();
        known[c.Name] = c.Dtype == "int64"
            ? OrtValue.CreateTensorValueFromMemory(MemoryMarshal.Cast<byte, long>(part).ToArray(), c.Shape)
            : OrtValue.CreateTensorValueFromMemory(MemoryMarshal.Cast<byte, float>(part).ToArray(), c.Shape);
    }
}

record Column(string Name, string Dtype, long[] Shape, int RowBytes, byte[] Rows);
