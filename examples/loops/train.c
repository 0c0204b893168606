/* Trains a step folder in onnxruntime, through its C API:

       cc -O2 train.c -o train -L<onnxruntime>/lib -lonnxruntime && ./train run/step run/

   run/ holds <input>.bin for each input and target: numbers, little-endian, one row a sample (see docs/how-to/loops.md).
   Prints a loss a step, then that of the first batch in evaluation; run/weights.bin gets the trained weights. */

#include <inttypes.h>

#include "json.h"
#include "ort.h"

enum { BATCH = 16, EPOCHS = 5, MOST = 64, AXES = 8 };

static const OrtApi* api;

static void check(OrtStatus* status) {
  if (status) exit(fprintf(stderr, "onnxruntime: %s\n", api->GetErrorMessage(status)));
}

static char* read_file(const char* folder, const char* name, const char* ending, size_t* size) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s%s", folder, name, ending);
  FILE* file = fopen(path, "rb");
  if (!file) exit(fprintf(stderr, "cannot read %s\n", path));
  fseek(file, 0, SEEK_END);
  *size = (size_t)ftell(file);
  rewind(file);
  char* content = (char*)calloc(*size + 1, 1);
  if (fread(content, 1, *size, file) != *size) exit(fprintf(stderr, "cannot read %s\n", path));
  fclose(file);
  return content;
}

/* --- tensors by name ------------------------------------------------------------------------------------------ */

typedef struct {
  const char* names[MOST];
  OrtValue* values[MOST];
  size_t count;
} Tensors;

static void put(Tensors* tensors, const char* name, OrtValue* value) {
  if (tensors->count == MOST) exit(fprintf(stderr, "more than %d tensors: enlarge MOST\n", MOST));
  tensors->names[tensors->count] = name;
  tensors->values[tensors->count++] = value;
}

static OrtValue** find(Tensors* tensors, const char* name) {
  for (size_t i = 0; i < tensors->count; i++)
    if (strcmp(tensors->names[i], name) == 0) return &tensors->values[i];
  return NULL;
}

static float number(Tensors* tensors, const char* name) {
  float* data;
  check(api->GetTensorMutableData(*find(tensors, name), (void**)&data));
  return *data;
}

static void release(Tensors* tensors) {
  for (size_t i = 0; i < tensors->count; i++)
    if (tensors->values[i]) api->ReleaseValue(tensors->values[i]);
  tensors->count = 0;
}

/* --- models --------------------------------------------------------------------------------------------------- */

typedef struct {
  OrtSession* session;
  char* inputs[MOST];
  char* outputs[MOST];
  size_t input_count, output_count;
} Model;

static Model open_model(OrtEnv* env, OrtSessionOptions* options, OrtAllocator* allocator, const char* folder,
                        const char* name) {
  Model model;
  char path[4096];
  snprintf(path, sizeof path, "%s/%s.onnx", folder, name);
  check(api->CreateSession(env, path, options, &model.session));
  check(api->SessionGetInputCount(model.session, &model.input_count));
  check(api->SessionGetOutputCount(model.session, &model.output_count));
  if (model.input_count > MOST || model.output_count > MOST)
    exit(fprintf(stderr, "more than %d tensors: enlarge MOST\n", MOST));
  for (size_t i = 0; i < model.input_count; i++)
    check(api->SessionGetInputName(model.session, i, allocator, &model.inputs[i]));
  for (size_t i = 0; i < model.output_count; i++)
    check(api->SessionGetOutputName(model.session, i, allocator, &model.outputs[i]));
  return model;
}

/* Feeds each input from the first of the given tensors that has its name. */
static Tensors run(Model* model, Tensors* batch, Tensors* rates, Tensors* state) {
  Tensors found = {.count = 0};
  const OrtValue* fed[MOST];
  Tensors* known[] = {batch, rates, state};
  for (size_t i = 0; i < model->input_count; i++) {
    OrtValue** value = NULL;
    for (int k = 0; k < 3 && !value; k++) value = find(known[k], model->inputs[i]);
    if (!value) exit(fprintf(stderr, "nothing to feed %s\n", model->inputs[i]));
    fed[i] = *value;
  }
  for (size_t i = 0; i < model->output_count; i++) put(&found, model->outputs[i], NULL);
  check(api->Run(model->session, NULL, (const char* const*)model->inputs, fed, model->input_count,
                 (const char* const*)model->outputs, model->output_count, found.values));
  return found;
}

/* --- the loop ------------------------------------------------------------------------------------------------- */

static size_t row_bytes(const Json* spec, int64_t* dims, size_t* rank) {
  const char* dtype = json_get(spec, "dtype")->text;
  size_t bytes = strcmp(dtype, "int64") == 0 ? 8 : 4;
  if (bytes == 4 && strcmp(dtype, "float32") != 0) exit(fprintf(stderr, "this loop feeds no %s\n", dtype));
  *rank = 0;
  for (Json* d = json_get(spec, "shape")->first; d; d = d->next) {
    if (*rank == AXES) exit(fprintf(stderr, "more than %d axes: enlarge AXES\n", AXES));
    dims[*rank] = *rank ? (int64_t)d->number : BATCH;
    if (*rank) bytes *= (size_t)d->number;
    ++*rank;
  }
  return bytes;
}

/* The state as evaluation and export read it: averages in place of weights, where the optimizer keeps some. */
static Tensors averaged(const Json* manifest, Tensors* state) {
  Tensors used = *state; /* the same values, not to be released twice */
  Json* averages = json_find(manifest, "averages");
  for (Json* a = averages ? averages->first : NULL; a; a = a->next) *find(&used, a->key) = *find(state, a->text);
  return used;
}

int main(int argc, char** argv) {
  if (argc != 3) exit(fprintf(stderr, "usage: train STEP DATA\n"));
  api = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  OrtEnv* env;
  OrtSessionOptions* options;
  OrtAllocator* allocator;
  OrtMemoryInfo* memory;
  check(api->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "train", &env));
  check(api->CreateSessionOptions(&options));
  check(api->GetAllocatorWithDefaultOptions(&allocator));
  check(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));

  size_t size;
  Json manifest = {0};
  json_value(read_file(argv[1], "manifest", ".json", &size), &manifest);
  Model init = open_model(env, options, allocator, argv[1], "init");
  Model train = open_model(env, options, allocator, argv[1], "train");
  Model eval = open_model(env, options, allocator, argv[1], "eval");
  Json* states = json_get(&manifest, "state");
  const char* loss = json_get(&manifest, "loss_output")->text;

  char* columns[MOST];
  Json* specs[MOST];
  size_t column_count = 0, rows = 0;
  const char* lists[] = {"inputs", "targets"};
  for (int l = 0; l < 2; l++)
    for (Json* s = json_get(&manifest, lists[l])->first; s; s = s->next) {
      int64_t dims[AXES];
      size_t rank, bytes = row_bytes(s, dims, &rank);
      const char* name = json_get(s, "name")->text;
      if (column_count == MOST) exit(fprintf(stderr, "more than %d columns: enlarge MOST\n", MOST));
      specs[column_count] = s;
      columns[column_count] = read_file(argv[2], name, ".bin", &size);
      if (column_count == 0) rows = size / bytes;
      if (size != rows * bytes) exit(fprintf(stderr, "%s.bin has not as many rows as the first input\n", name));
      column_count++;
    }

  Tensors rates = {.count = 0}, none = {.count = 0};
  float numbers[MOST];
  for (Json* h = json_get(&manifest, "hyperparameters")->first; h; h = h->next) {
    OrtValue* value;
    if (rates.count == MOST) exit(fprintf(stderr, "more than %d numbers: enlarge MOST\n", MOST));
    numbers[rates.count] = (float)h->number;
    check(api->CreateTensorWithDataAsOrtValue(memory, &numbers[rates.count], sizeof(float), NULL, 0,
                                              ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, &value));
    put(&rates, h->key, value);
  }

  Tensors state = run(&init, &none, &none, &none);
  for (int epoch = 0; epoch <= EPOCHS; epoch++)
    for (size_t begin = 0; begin + BATCH <= rows; begin += BATCH) {
      Tensors batch = {.count = 0};
      for (size_t c = 0; c < column_count; c++) {
        int64_t dims[AXES];
        size_t rank, bytes = row_bytes(specs[c], dims, &rank);
        int is_float = strcmp(json_get(specs[c], "dtype")->text, "float32") == 0;
        OrtValue* value;
        check(api->CreateTensorWithDataAsOrtValue(
            memory, columns[c] + begin * bytes, BATCH * bytes, dims, rank,
            is_float ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, &value));
        put(&batch, json_get(specs[c], "name")->text, value);
      }
      if (epoch == EPOCHS) { /* the end: the first batch, in evaluation */
        Tensors used = averaged(&manifest, &state), found = run(&eval, &batch, &none, &used);
        printf("eval %.6f\n", number(&found, loss));
        release(&found);
        release(&batch);
        break;
      }
      Tensors found = run(&train, &batch, &rates, &state);
      printf("%.6f\n", number(&found, loss));
      Tensors following = {.count = 0};
      for (Json* s = states->first; s; s = s->next) {
        OrtValue** value = find(&found, json_get(s, "next")->text);
        put(&following, json_get(s, "name")->text, *value);
        *value = NULL; /* not released with the others */
      }
      release(&found);
      release(&batch);
      release(&state);
      state = following;
    }

  char path[4096];
  snprintf(path, sizeof path, "%s/weights.bin", argv[2]);
  FILE* file = fopen(path, "wb");
  if (!file) exit(fprintf(stderr, "cannot write %s\n", path));
  Tensors used = averaged(&manifest, &state);
  for (Json* s = states->first; s; s = s->next) {
    if (strcmp(json_get(s, "kind")->text, "parameter") != 0) continue;
    OrtValue* value = *find(&used, json_get(s, "name")->text);
    OrtTensorTypeAndShapeInfo* shape;
    float* data;
    check(api->GetTensorTypeAndShape(value, &shape));
    check(api->GetTensorShapeElementCount(shape, &size));
    check(api->GetTensorMutableData(value, (void**)&data));
    api->ReleaseTensorTypeAndShapeInfo(shape);
    if (fwrite(data, sizeof(float), size, file) != size) exit(fprintf(stderr, "cannot write %s\n", path));
  }
  fclose(file);
  release(&state);
  release(&rates);
  api->ReleaseSession(train.session);
  api->ReleaseSession(eval.session);
  api->ReleaseSession(init.session);
  api->ReleaseMemoryInfo(memory);
  api->ReleaseSessionOptions(options);
  api->ReleaseEnv(env);
  return 0;
}
