// `streamText` of the Vercel AI SDK with tools; its standard provider refers to earlier items by id.

import { createOpenAI } from "@ai-sdk/openai";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const price = tool({
  description: "The price of an item.",
  inputSchema: z.object({ item: z.string() }),
  execute: async ({ item }) => `${item.length} for ${item}`,
});
const { textStream } = streamText({
  model: createOpenAI()("policy"),
  tools: { price },
  stopWhen: stepCountIs(8),
  prompt: process.argv[2],
  onError: ({ error }) => {
    throw error;
  },
});
for await (const text of textStream) process.stdout.write(text);
