// The errors of the library. Each message is one sentence: what is wrong, what was expected, and how to fix it.

export class GradgraphError extends Error {
  name = "GradgraphError";
}

export class DivergedError extends GradgraphError {
  name = "DivergedError";
}
