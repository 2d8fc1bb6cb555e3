// The loop of tools of `@anthropic-ai/sdk`.

import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

const price = betaTool({
  name: "price",
  description: "The price of an item.",
  inputSchema: { type: "object", properties: { item: { type: "string" } }, required: ["item"] },
  run: ({ item }) => `${item.length} for ${item}`,
});
const last = await new Anthropic().beta.messages.toolRunner({
  model: "policy",
  max_tokens: 500,
  tools: [price],
  messages: [{ role: "user", content: process.argv[2] }],
});
console.log(last.content);
