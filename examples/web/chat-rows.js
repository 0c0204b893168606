// Reads and checks chat data: lines of JSON with messages, with a prompt and its completion, or with a text.

import { GradgraphError } from "./errors.js";

/** The kinds of rows and the columns they require; a row has the first kind whose columns it has. */
const KINDS = { messages: ["messages"], prompt: ["prompt", "completion"], text: ["text"] };
const ROLES = ["system", "developer", "user", "assistant", "tool"];
/** The roles that may follow each role; "" has the roles of the first message. */
const AFTER = {
  "": ["system", "developer", "user"],
  system: ["user"],
  developer: ["user"],
  user: ["assistant"],
  assistant: ["user", "tool"],
  tool: ["assistant", "tool", "user"],
};

/**
 * Return the rows in a text with one JSON object per line, or with a list of objects. Each row is checked, and has its
 * `kind` and its `place`, such as "line 3", for error messages.
 */
export function rowsOf(text) {
  const lines = text.split(/\r?\n/).map((line, i) => [line.trim(), `line ${i + 1}`]);
  const whole = text.trim();
  const given = whole.startsWith("[")
    ? parsed(whole, "the text").map((row, i) => [row, `row ${i + 1}`])
    : lines.filter(([line]) => line).map(([line, place]) => [parsed(line, place), place]);
  if (!given.length)
    throw new GradgraphError('there are no rows; write one per line, such as {"prompt": …, "completion": …}');
  return given.map(([row, place]) => {
    const kind = Object.keys(KINDS).find((name) => KINDS[name].every((column) => row?.[column] != null));
    const fault = kind ? FAULTS[kind](row) : `it has neither ${Object.values(KINDS).map(both).join(", nor ")}`;
    if (fault) throw new GradgraphError(`${place}: ${fault}`);
    return { ...row, kind, place };
  });
}

const both = (columns) => columns.map((name) => `'${name}'`).join(" and ");

function parsed(line, place) {
  try {
    return JSON.parse(line);
  } catch (error) {
    throw new GradgraphError(`${place} is not valid JSON (${error.message}); write one object per line`);
  }
}

const FAULTS = {
  messages: ({ messages }) => faultOfMessages(messages),
  prompt: ({ prompt, completion }) => {
    if (Array.isArray(prompt) && Array.isArray(completion)) return faultOfMessages([...prompt, ...completion]);
    if (typeof prompt !== "string" || typeof completion !== "string")
      return "'prompt' and 'completion' should both be text, or both be messages";
    return completion.trim() ? undefined : "'completion' is empty; write an answer, or drop the row";
  },
  text: ({ text }) =>
    typeof text === "string" && text.trim() ? undefined : "'text' is not text, or empty; write a text, or drop the row",
};

/** Return what is wrong with messages, which must end with an answer; undefined if they are valid. */
function faultOfMessages(messages) {
  if (!Array.isArray(messages) || !messages.length) return "the messages should be a list of {role, content}";
  for (const [i, { role, content, weight = 1, tool_calls: calls } = {}] of messages.entries()) {
    if (!ROLES.includes(role)) return `message ${i + 1} has the role '${role}'; there are ${ROLES.join(", ")}`;
    const before = messages[i - 1]?.role ?? "";
    if (!AFTER[before].includes(role))
      return `message ${i + 1} of the role '${role}' ${before ? `follows '${before}'` : "is the first"}; reorder the messages`;
    if (![0, 1, null, true, false].includes(weight))
      return `message ${i + 1} has the weight ${weight}; use 1 to train on an answer, and 0 to skip it`;
    if (role === "assistant" && calls) continue;
    if (typeof content !== "string") return `message ${i + 1} has no text in 'content'`;
    if (role === "assistant" && !content.trim())
      return `message ${i + 1} is an empty answer; write an answer, or drop the row`;
  }
  const last = messages.at(-1).role;
  if (last !== "assistant")
    return `the last message has the role '${last}', but training requires an assistant's answer; add one`;
}
