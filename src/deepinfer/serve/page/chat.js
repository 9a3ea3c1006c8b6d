// The conversation: what was said, what is asked, and the answer as it is written.

import { ask, events } from "./client.js";
import { Attachments } from "./images.js";

const byId = (id) => document.getElementById(id);
const [list, text, send, stop] = ["messages", "text", "send", "stop"].map(byId);
let messages = [];
const images = new Attachments(byId("ask"), byId("files"), byId("images"), (problem) => show("error", problem));
let running = null; // AbortController of the answer that is being written

function add(tag, parent, className, content = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = content;
  parent.append(element);
  return element;
}

function show(role, content) {
  const item = add("li", list, role, content);
  item.scrollIntoView({ block: "end" });
  return item;
}

// A box's JSON, or undefined when it is empty. Throws an error that names the box.
function json(id, name) {
  const value = byId(id).value.trim();
  if (!value) return undefined;
  try {
    return JSON.parse(value);
  } catch (error) {
    throw new Error(`${name} is no JSON: ${error.message}`);
  }
}

function body() {
  const system = byId("system").value.trim();
  const result = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    thinking: { type: byId("thinking").checked ? "enabled" : "disabled" },
  };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (byId(name).value !== "") result[name] = Number(byId(name).value);
  }
  if (byId("thinking").checked && byId("effort").value) result.reasoning_effort = byId("effort").value;
  const tools = json("tools", "Tools");
  if (tools !== undefined) Object.assign(result, { tools, tool_choice: byId("tool_choice").value });
  const schema = json("schema", "JSON schema");
  if (schema !== undefined) {
    result.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return result;
}

// One answer on the page, to a conversation. Everything is set as text, never as markup.
class Answer {
  constructor(conversation) {
    this.conversation = conversation;
    this.item = show("assistant", "");
    this.message = { role: "assistant", content: "" };
    this.calls = [];
    this.started = performance.now();
    this.reason = "";
  }

  take(delta) {
    this.first ??= performance.now();
    if (delta.reasoning_content) {
      if (!this.thinking) {
        const fold = add("details", this.item);
        add("summary", fold, "", "Thinking");
        this.thinking = add("div", fold);
      }
      this.message.reasoning_content = (this.message.reasoning_content ?? "") + delta.reasoning_content;
      this.thinking.textContent = this.message.reasoning_content;
    }
    if (delta.content) {
      this.content ??= add("div", this.item, "content");
      this.message.content += delta.content;
      this.content.textContent = this.message.content;
    }
    for (const { index, id, function: part } of delta.tool_calls ?? []) {
      this.calls[index] ??= { id, name: "", arguments: "", box: add("pre", this.item, "call") };
      const call = this.calls[index];
      call.name += part.name ?? "";
      call.arguments += part.arguments ?? "";
      call.box.textContent = `${call.name}(${call.arguments})`;
    }
    const isNear = list.scrollHeight - list.scrollTop - list.clientHeight < 120;
    if (isNear) list.scrollTop = list.scrollHeight;
  }

  end(usage) {
    const seconds = (performance.now() - this.started) / 1000;
    const first = this.first ? `, first after ${((this.first - this.started) / 1000).toFixed(2)} s` : "";
    const tokens = usage ? `${usage.completion_tokens} tokens, ` : "";
    add("div", this.item, "note", `${tokens}${seconds.toFixed(1)} s${first}${this.reason ? `, ${this.reason}` : ""}`);
    if (this.calls.length) {
      this.message.tool_calls = this.calls.map((call) => ({
        id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
      }));
    }
    this.conversation.push(this.message);
  }
}

// What comes next in a conversation. Calls wait for results: the person's next text is the result of each.
function next(conversation, content) {
  const calls = conversation.at(-1)?.tool_calls;
  if (!calls) return [{ role: "user", content }];
  return calls.map((call) => ({ role: "tool", tool_call_id: call.id, content }));
}

async function run(said) {
  const conversation = messages; // a new one may begin meanwhile
  const before = conversation.length;
  const { content, names } = images.content(said);
  conversation.push(...next(conversation, content));
  show("user", [said, ...names].join("\n"));
  const fail = (error) => {
    conversation.length = before;
    text.value ||= said;
    show("error", error.message);
  };
  let request;
  try {
    request = body();
  } catch (error) {
    fail(error);
    return;
  }
  const answer = new Answer(conversation);
  running = new AbortController();
  let usage = null;
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST", body: JSON.stringify(request), signal: running.signal,
      headers: { "content-type": "application/json" },
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    images.clear();
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (choice) answer.take(choice.delta);
      if (choice?.finish_reason) answer.reason = choice.finish_reason;
    }
    answer.end(usage);
  } catch (error) {
    if (error.name === "AbortError") {
      answer.reason = "stopped";
      answer.end(usage);
    } else {
      answer.item.remove();
      fail(error);
    }
  } finally {
    running = null;
  }
}

async function submit() {
  const said = text.value.trim();
  if (!said || running) return;
  text.value = "";
  [send.disabled, stop.disabled] = [true, false];
  await run(said);
  [send.disabled, stop.disabled] = [false, true];
  text.focus();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
stop.addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  list.replaceChildren();
  text.focus();
});
byId("parameters").addEventListener("submit", (event) => event.preventDefault());

ask("v1/models").then(async (response) => {
  const { data } = await response.json();
  byId("model").textContent = data ? `${data[0].id}, ${data[0].max_model_len} tokens` : "";
});
