/* Trains the head of a frozen network without a runtime; the frozen layers run once for each sample:

       python examples/frozen/make_parts.py run/
       cc -O2 -Irun/frozen -Irun/trainer examples/frozen/train_head.c run/frozen/frozen.c run/trainer/trainer.c \
          -lm -o run/train_head && run/train_head run/

   frozen.c is the exported features.onnx, for one sample; trainer.c is the exported step/, for a batch of samples.
   Prints the loss of each step. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "frozen.h"
#include "trainer.h"

enum { ROWS = 64, BATCH = TRAINER_TARGET_SIZE, EPOCHS = 3, WIDTH = 16 };

static frozen_t frozen;     /* the frozen layers: working memory only */
static trainer_t trainer;   /* the head: weights, optimizer state and working memory */
static float x[ROWS][FROZEN_X_SIZE], kept[ROWS][WIDTH];
static int64_t target[ROWS];

static void read_file(const char* folder, const char* name, void* data, size_t size) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE* file = fopen(path, "rb");
  if (!file || fread(data, 1, size, file) != size) {
    fprintf(stderr, "cannot read %s\n", path);
    exit(1);
  }
  fclose(file);
}

int main(int argc, char** argv) {
  if (argc != 2) return fprintf(stderr, "usage: train_head FOLDER\n"), 1;
  read_file(argv[1], "x.bin", x, sizeof x);
  read_file(argv[1], "target.bin", target, sizeof target);

  frozen_init(&frozen);
  for (int i = 0; i < ROWS; i++)
    if (frozen_run(&frozen, x[i], kept[i]) != FROZEN_OK) return 1;

  trainer_init(&trainer);
  for (int epoch = 0; epoch < EPOCHS; epoch++)
    for (int first = 0; first + BATCH <= ROWS; first += BATCH) {
      float loss;
      if (trainer_step(&trainer, kept[first], target + first, 0.05f, &loss, NULL) != TRAINER_OK) return 1;
      printf("%.6f\n", (double)loss);
    }
  return 0;
}
