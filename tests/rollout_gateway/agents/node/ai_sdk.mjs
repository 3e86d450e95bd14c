// The Vercel AI SDK: two runs of one conversation, each a tool call and a text, streamed.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const bias = JSON.parse(process.env.AGENT_LOGIT_BIAS);
const provider = createOpenAICompatible({
  name: "gateway",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
  includeUsage: true,
  transformRequestBody: (body) => ({ ...body, logit_bias: bias }),
});
const cells = [];
const move = tool({
  description: "Play a cell.",
  strict: true,
  inputSchema: z.object({ cell: z.enum(["a1", "b2"]) }),
  execute: async ({ cell }) => {
    cells.push(cell);
    return "ok";
  },
});
let messages = [];
let text = "";
let chunks = 0;
for (const board of ["a1=x", "b2=o"]) {
  messages.push({ role: "user", content: board });
  const result = streamText({
    model: provider("tictactoe"),
    messages,
    tools: { move },
    maxOutputTokens: 75,
    maxRetries: 0,
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "move" } : "none" }),
    onError: ({ error }) => {
      throw error;
    },
  });
  for await (const piece of result.fullStream) {
    if (piece.type === "text-delta") text += piece.text;
    chunks += 1;
  }
  for (const step of await result.steps) messages = messages.concat(step.response.messages);
}
console.log(JSON.stringify({ cells, text, chunks }));
