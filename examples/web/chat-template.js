// Chat templates: a conversation as one text, and which parts of it the assistant says. As gradgraph.chat in Python.

import { GradgraphError } from "./errors.js";

const GENERATION = /\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}/g;
// @huggingface/jinja 0.5 strips all blanks where a template says which: content.strip('\n')
const STRIPS = /\.[lr]?strip\(\s*[^)\s]/;
const [BEGIN, END] = ["\ufdd0", "\ufdd1"]; // around what the assistant says: no characters of Unicode, so in no text

export class ChatTemplate {
  /** `Template` is the class of @huggingface/jinja; `tokens` are the special tokens that a template may name. */
  constructor(source, tokens, Template) {
    this.tokens = tokens;
    this.strips = STRIPS.test(source);
    this.marksAnswers = source.search(GENERATION) >= 0;
    // as blocks, so that what Jinja removes around a block is removed
    const marked = source.replace(GENERATION, (_, left, end, right) =>
      end ? `{%${left} if true %}${END}{% endif ${right}%}` : `{%${left} if true %}${BEGIN}{% endif ${right}%}`,
    );
    try {
      this.template = new Template(marked);
    } catch (error) {
      throw new GradgraphError(`the chat template is no Jinja (${error.message}); give another one`, { cause: error });
    }
  }

  /** The text of messages. */
  render(messages, { tools = null, addGenerationPrompt = false } = {}) {
    return withoutMarks(this.#rendered(messages, tools, addGenerationPrompt)).text;
  }

  /**
   * {text, answers}: the text of messages, and where in it the assistant says what is learnt, as [first, behind the
   * last]. Answers among the first `given` messages, and those of the `weight` 0, are not learnt.
   */
  withAnswers(messages, { tools = null, given = 0 } = {}) {
    const { text, answers } = withoutMarks(this.#rendered(messages, tools, false));
    const said = messages.flatMap(({ role }, i) => (role === "assistant" ? [i] : []));
    const learnt = said.filter((i) => i >= given && messages[i].weight !== 0);
    if (!this.marksAnswers) return { text, answers: learnt.map((i) => this.#span(messages, i, text, tools)) };
    if (learnt.length < said.length && answers.length !== said.length)
      throw new GradgraphError(
        `the chat template marks ${answers.length} answers of ${said.length}, so that it cannot be said which of them ` +
          "are not learnt; mark each answer by {% generation %} once",
      );
    const isLearnt = (_, i) => learnt.length === said.length || learnt.includes(said[i]);
    return { text, answers: answers.filter(isLearnt).filter(([begin, end]) => begin < end) };
  }

  /** Where the answer that is message `i` stands in the text of all messages. */
  #span(messages, i, text, tools) {
    const before = this.#rendered(messages.slice(0, i), tools, true);
    let behind = i + 1 === messages.length ? text : this.#rendered(messages.slice(0, i + 1), tools, false);
    const end = this.tokens.eos_token;
    if (!text.startsWith(behind) && end && behind.endsWith(end)) behind = behind.slice(0, -end.length);
    if (!behind.startsWith(before) || !text.startsWith(behind))
      throw new GradgraphError(
        `the chat template changes what stands before the answer in message ${i + 1} once more follows; mark answers ` +
          "by {% generation %} and {% endgeneration %} in it, or make rows of one answer each",
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
      throw new GradgraphError(`the chat template refuses the messages (${error.message}); write them as it expects`, {
        cause: error,
      });
    }
  }
}

/** Refuse what would be stripped of more than line ends. */
function checkEnds({ role, content }, i) {
  const pieces = role === "assistant" ? String(content ?? "").split(/<\/?think>/) : [];
  if (pieces.some((piece) => piece.replace(/^\n+|\n+$/g, "") !== piece.trim()))
    throw new GradgraphError(
      `message ${i + 1} begins or ends with blanks, of which the chat template keeps some, ` +
        "and @huggingface/jinja none; remove them",
    );
}

/** A message whose reasoning has every name that templates read it by. */
function withReasoning(message) {
  const found = message.reasoning_content ?? message.thinking ?? message.reasoning;
  return found == null ? message : { thinking: found, ...message, reasoning_content: found };
}

/** The text, and the spans that stand between marks, empty ones too. */
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
