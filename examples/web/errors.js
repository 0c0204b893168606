// What the library throws: one sentence that says what was expected, and what to do.

export class GradgraphError extends Error {
  name = "GradgraphError";
}

export class DivergedError extends GradgraphError {
  name = "DivergedError";
}
