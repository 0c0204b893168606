// Chat templates, which format a conversation as text, and locate the assistant's answers in it, as gradgraph.chat does
// in Python.

import { GradgraphError } from "./errors.js";

const GENERATION = /\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}/g;
// templates that strip certain characters, such as content.strip('\n'): @huggingface/jinja 0.5 strips all whitespace
const STRIPS = /\.[lr]?strip\(\s*[^)\s]/;
const [BEGIN, END] = ["\ufdd0", "\ufdd1"]; // marks around answers: not Unicode characters, so not in any text

export class ChatTemplate {
  /** `Template` is the class of @huggingface/jinja; `tokens` are the special tokens that a template may name. */
  constructor(source, tokens, Template) {
    this.tokens = tokens;
    this.strips = STRIPS.test(source);
    this.marksAnswers = source.search(GENERATION) >= 0;
    // the marks are blocks, too, so that Jinja removes the same whitespace around them
    const marked = source.replace(GENERATION, (_, left, end, right) =>
      end ? `{%${left} if true %}${END}{% endif ${right}%}` : `{%${left} if true %}${BEGIN}{% endif ${right}%}`,
    );
    try {
      this.template = new Template(marked);
    } catch (error) {
      const why = `the chat template is not a valid Jinja template (${error.message}); choose another one`;
      throw new GradgraphError(why, { cause: error });
    }
  }

  /** Return the text of messages. */
  render(messages, { tools = null, addGenerationPrompt = false } = {}) {
    return withoutMarks(this.#rendered(messages, tools, addGenerationPrompt)).text;
  }

  /**
   * Return {text, answers}: the text of messages, and the spans [begin, end] in it of the answers to train on. Answers
   * among the first `given` messages, and answers of `weight` 0, are not trained on.
   */
  withAnswers(messages, { tools = null, given = 0 } = {}) {
    const { text, answers } = withoutMarks(this.#rendered(messages, tools, false));
    const said = messages.flatMap(({ role }, i) => (role === "assistant" ? [i] : []));
    const learnt = said.filter((i) => i >= given && messages[i].weight !== 0);
    if (!this.marksAnswers) return { text, answers: learnt.map((i) => this.#span(messages, i, text, tools)) };
    if (learnt.length < said.length && answers.length !== said.length)
      throw new GradgraphError(
        `the chat template marks ${answers.length} answers of ${said.length}, so it is unclear which of them to ` +
          "exclude; mark each answer with {% generation %} once",
      );
    const isLearnt = (_, i) => learnt.length === said.length || learnt.includes(said[i]);
    return { text, answers: answers.filter(isLearnt).filter(([begin, end]) => begin < end) };
  }

  /** Return the span [begin, end] of the answer in message `i` within the text of all messages. */
  #span(messages, i, text, tools) {
    const before = this.#rendered(messages.slice(0, i), tools, true);
    let behind = i + 1 === messages.length ? text : this.#rendered(messages.slice(0, i + 1), tools, false);
    const end = this.tokens.eos_token;
    if (!text.startsWith(behind) && end && behind.endsWith(end)) behind = behind.slice(0, -end.length);
    if (!behind.startsWith(before) || !text.startsWith(behind))
      throw new GradgraphError(
        `the chat template changes the text before the answer in message ${i + 1} if more messages follow, so the ` +
          "answers cannot be located; mark them with {% generation %} and {% endgeneration %} in the template, or " +
          "split rows into one answer each",
      );
    return [before.length, behind.length];
  }

  #rendered(messages, tools, addGenerationPrompt) {
    if (this.strips) messages.forEach(checkEnds);
    try {
      return this.template.render({
        ...this.tokens,
        messages: messages.map(withReasoning),
        tools,
        documents: null,
        add_generation_prompt: addGenerationPrompt,
      });
    } catch (error) {
      const why = `the chat template rejects the messages (${error.message}); write them as it expects`;
      throw new GradgraphError(why, { cause: error });
    }
  }
}

/** Throw a GradgraphError for a message from which @huggingface/jinja would strip more than line ends. */
function checkEnds({ role, content }, i) {
  const pieces = role === "assistant" ? String(content ?? "").split(/<\/?think>/) : [];
  if (pieces.some((piece) => piece.replace(/^\n+|\n+$/g, "") !== piece.trim()))
    throw new GradgraphError(
      `message ${i + 1} begins or ends with whitespace that the chat template keeps in part, but @huggingface/jinja ` +
        "would strip; remove it",
    );
}

/** Return a message with its reasoning under every name by which templates read it. */
function withReasoning(message) {
  const found = message.reasoning_content ?? message.thinking ?? message.reasoning;
  return found == null ? message : { thinking: found, ...message, reasoning_content: found };
}

/** Return {text, answers}: the text without marks, and the spans between marks, including empty ones. */
function withoutMarks(marked) {
  const answers = [];
  let text = "";
  for (const piece of marked.split(new RegExp(`(${BEGIN}[^${END}]*${END})`))) {
    const plain = piece.replaceAll(BEGIN, "").replaceAll(END, "");
    if (piece.startsWith(BEGIN)) answers.push([text.length, text.length + plain.length]);
    text += plain;
  }
  return { text, answers };
}
