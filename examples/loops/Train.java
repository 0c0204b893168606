// Trains a step folder in onnxruntime: com.microsoft.onnxruntime:onnxruntime, and com.google.code.gson:gson for JSON.
//
//     java -cp onnxruntime.jar:gson.jar Train.java run/step run/
//
// As train.c (see docs/how-to/loops.md).

import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OnnxTensorLike;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;

public class Train {
  static final int BATCH = 16;
  static final int EPOCHS = 5;
  static final OrtEnvironment environment = OrtEnvironment.getEnvironment();

  /** An input or target: all its rows. */
  record Column(String name, OnnxJavaType type, long[] shape, int rowBytes, byte[] rows) {
    static Column read(JsonObject spec, Path folder) throws IOException {
      String name = spec.get("name").getAsString(), dtype = spec.get("dtype").getAsString();
      if (!dtype.equals("float32") && !dtype.equals("int64")) throw new IOException("this loop feeds no " + dtype);
      OnnxJavaType type = dtype.equals("int64") ? OnnxJavaType.INT64 : OnnxJavaType.FLOAT;
      long[] shape = new long[spec.getAsJsonArray("shape").size()];
      int bytes = type == OnnxJavaType.INT64 ? 8 : 4;
      shape[0] = BATCH;
      for (int i = 1; i < shape.length; i++) {
        shape[i] = spec.getAsJsonArray("shape").get(i).getAsLong();
        bytes *= (int) shape[i];
      }
      return new Column(name, type, shape, bytes, Files.readAllBytes(folder.resolve(name + ".bin")));
    }

    OnnxTensor batch(int begin) throws OrtException {
      ByteBuffer buffer = ByteBuffer.allocateDirect(BATCH * rowBytes).order(ByteOrder.nativeOrder());
      buffer.put(rows, begin * rowBytes, BATCH * rowBytes).rewind();
      return OnnxTensor.createTensor(environment, buffer, shape, type);
    }
  }

  /** Feeds each input from the tensor of its name. */
  static OrtSession.Result run(OrtSession session, Map<String, OnnxTensorLike> known) throws OrtException {
    Map<String, OnnxTensorLike> fed = new HashMap<>();
    for (String name : session.getInputNames()) fed.put(name, known.get(name));
    return session.run(fed);
  }

  static OnnxTensor tensor(OrtSession.Result found, String name) {
    return (OnnxTensor) found.get(name).orElseThrow();
  }

  static float number(OrtSession.Result found, String name) {
    return tensor(found, name).getFloatBuffer().get(0);
  }

  public static void main(String[] words) throws OrtException, IOException {
    Path folder = Path.of(words[0]), data = Path.of(words[1]);
    JsonObject manifest = JsonParser.parseString(Files.readString(folder.resolve("manifest.json"))).getAsJsonObject();
    String loss = manifest.get("loss_output").getAsString();
    OrtSession init = environment.createSession(folder.resolve("init.onnx").toString());
    OrtSession train = environment.createSession(folder.resolve("train.onnx").toString());
    OrtSession eval = environment.createSession(folder.resolve("eval.onnx").toString());
    List<Column> columns = new ArrayList<>();
    for (String list : List.of("inputs", "targets"))
      for (JsonElement s : manifest.getAsJsonArray(list)) columns.add(Column.read(s.getAsJsonObject(), data));
    int rows = columns.get(0).rows().length / columns.get(0).rowBytes();
    for (Column column : columns)
      if (column.rows().length != rows * column.rowBytes())
        throw new IOException(column.name() + ".bin has not as many rows as the first input");

    Map<String, OnnxTensorLike> known = new HashMap<>(); // batch, hyperparameters and state, by name
    for (Map.Entry<String, JsonElement> rate : manifest.getAsJsonObject("hyperparameters").entrySet())
      known.put(rate.getKey(), OnnxTensor.createTensor(environment, rate.getValue().getAsFloat()));
    OrtSession.Result state = init.run(Map.of()); // owns the state: closed when the next one is there
    for (JsonElement s : manifest.getAsJsonArray("state")) {
      String name = s.getAsJsonObject().get("name").getAsString();
      known.put(name, tensor(state, name));
    }

    for (int epoch = 0; epoch < EPOCHS; epoch++) {
      for (int begin = 0; begin + BATCH <= rows; begin += BATCH) {
        feed(known, columns, begin);
        OrtSession.Result found = run(train, known);
        System.out.println(String.format(Locale.ROOT, "%.6f", number(found, loss)));
        for (JsonElement s : manifest.getAsJsonArray("state")) {
          JsonObject spec = s.getAsJsonObject();
          known.put(spec.get("name").getAsString(), tensor(found, spec.get("next").getAsString()));
        }
        state.close();
        state = found;
      }
    }
    feed(known, columns, 0);
    Map<String, OnnxTensorLike> used = new HashMap<>(known); // averages in place of weights, if the optimizer has some
    if (manifest.has("averages"))
      for (Map.Entry<String, JsonElement> pair : manifest.getAsJsonObject("averages").entrySet())
        used.put(pair.getKey(), known.get(pair.getValue().getAsString()));
    try (OrtSession.Result found = run(eval, used)) {
      System.out.println(String.format(Locale.ROOT, "eval %.6f", number(found, loss)));
    }

    try (var weights = Files.newOutputStream(data.resolve("weights.bin"))) {
      for (JsonElement s : manifest.getAsJsonArray("state")) {
        JsonObject spec = s.getAsJsonObject();
        if (!spec.get("kind").getAsString().equals("parameter")) continue;
        FloatBuffer numbers = ((OnnxTensor) used.get(spec.get("name").getAsString())).getFloatBuffer();
        ByteBuffer bytes = ByteBuffer.allocate(4 * numbers.remaining()).order(ByteOrder.LITTLE_ENDIAN);
        bytes.asFloatBuffer().put(numbers);
        weights.write(bytes.array());
      }
    }
    state.close();
  }

  static void feed(Map<String, OnnxTensorLike> known, List<Column> columns, int begin) throws OrtException {
    for (Column column : columns) {
      OnnxTensorLike old = known.put(column.name(), column.batch(begin));
      if (old != null) old.close();
    }
  }
}
