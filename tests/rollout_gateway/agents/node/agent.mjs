// OpenAI's JavaScript client: two games, each a forced tool call, its result, and a text; all streamed.
import OpenAI from "openai";

const client = new OpenAI(); // OPENAI_BASE_URL and OPENAI_API_KEY, as everywhere
const move = {
  type: "function",
  function: {
    name: "move",
    strict: true,
    parameters: {
      type: "object",
      properties: { cell: { type: "string", enum: ["a1", "b2"] } },
      required: ["cell"],
      additionalProperties: false,
    },
  },
};
const bias = JSON.parse(process.env.AGENT_LOGIT_BIAS);
const messages = [];
const cells = [];
let text = "";
let chunks = 0;

async function say(toolChoice) {
  const stream = await client.chat.completions.create({
    model: "tictactoe",
    messages,
    tools: [move],
    tool_choice: toolChoice,
    max_completion_tokens: 75,
    logit_bias: bias,
    seed: 1,
    stream: true,
    stream_options: { include_usage: true },
  });
  const message = { role: "assistant", content: "" };
  for await (const chunk of stream) {
    chunks += 1;
    const delta = chunk.choices[0]?.delta ?? {};
    message.content += delta.content ?? "";
    for (const { index, id, function: piece } of delta.tool_calls ?? []) {
      message.tool_calls ??= [];
      const call = (message.tool_calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
      call.function.name += piece.name ?? "";
      call.function.arguments += piece.arguments ?? "";
    }
  }
  text += message.content;
  messages.push(message);
  return message.tool_calls;
}

for (const board of ["a1=x", "b2=o"]) {
  messages.push({ role: "user", content: board });
  const [call] = await say({ type: "function", function: { name: "move" } });
  cells.push(JSON.parse(call.function.arguments).cell);
  messages.push({ role: "tool", tool_call_id: call.id, content: "ok" });
  await say("none");
}
console.log(JSON.stringify({ cells, text, chunks }));
