// The openai package of npm, streaming, with a tool.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

// Its folder is an argument: packages are searched beside a program, not beside its node_modules.
const { OpenAI } = createRequire(process.argv[2] + "/")("openai");
const client = new OpenAI();
const { messages } = JSON.parse(readFileSync(0, "utf-8"));
const add = {
  name: "add",
  description: "Add two numbers.",
  parameters: { type: "object", properties: { a: { type: "number" }, b: { type: "number" } } },
};
let reply;
for (let turn = 0; turn < 4; turn++) {
  const tools = [{ type: "function", function: add }];
  const stream = client.chat.completions.stream({ model: "policy", messages, tools });
  reply = (await stream.finalChatCompletion()).choices[0].message;
  messages.push(reply);
  if (!reply.tool_calls?.length) break;
  for (const call of reply.tool_calls) {
    const { a, b } = JSON.parse(call.function.arguments);
    messages.push({ role: "tool", tool_call_id: call.id, content: String(a + b) });
  }
}
console.log(reply.content);
