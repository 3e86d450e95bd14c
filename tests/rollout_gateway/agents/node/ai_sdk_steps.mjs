// The Vercel AI SDK with OpenAI's provider, whose default is `/v1/responses`: tool steps until the model stops, twice.
//     ai_sdk_steps.mjs MAJOR
import { z } from "zod";

const [major] = process.argv.slice(2);
const { stepCountIs, streamText, tool } = await import(`ai${major}`);
const { createOpenAI } = await import(`openai${major}`);
const provider = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY });
const cells = [];
const move = tool({
  description: "Play a cell.",
  inputSchema: z.object({ cell: z.enum(["a1", "b2"]) }),
  execute: async ({ cell }) => {
    cells.push(cell);
    return "ok";
  },
});
let messages = [];
let text = "";
for (const board of ["a1=x", "b2=o"]) {
  messages.push({ role: "user", content: board });
  const result = streamText({
    model: provider("tictactoe"),
    system: "Play.",
    messages,
    tools: { move },
    maxRetries: 0,
    stopWhen: stepCountIs(50),
    onError: ({ error }) => {
      throw error;
    },
  });
  for await (const piece of result.textStream) text += piece;
  messages = messages.concat((await result.response).messages);
}
console.log(JSON.stringify({ cells, text }));
