#!/bin/sh
# sh agent.sh QUESTION      prices.txt and partners.txt are beside it; needs curl and jq
set -eu

tools='[{"type": "function", "function": {
    "name": "shell", "description": "Runs a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}]'
messages=$(jq -cn --arg text "$1" '[{role: "user", content: $text}]')

while :; do
    body=$(jq -cn --argjson messages "$messages" --argjson tools "$tools" '{model: "policy", $messages, $tools}')
    reply=$(printf '%s' "$body" | curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
        -H "Authorization: Bearer $OPENAI_API_KEY" -H 'Content-Type: application/json' --data-binary @-)
    message=$(printf '%s' "$reply" | jq -c '.choices[0].message')
    messages=$(printf '%s' "$messages" | jq -c --argjson message "$message" '. + [$message]')
    calls=$(printf '%s' "$message" | jq -c '.tool_calls // [] | .[]')
    if [ -z "$calls" ]; then break; fi
    while IFS= read -r call; do
        command=$(printf '%s' "$call" | jq -r '.function.arguments | fromjson? | .command // empty')
        result=$(sh -c "$command" 2>&1 | head -c 1000) || true
        messages=$(printf '%s' "$messages" | jq -c --argjson call "$call" --arg result "$result" \
            '. + [{role: "tool", tool_call_id: $call.id, content: $result}]')
    done <<END
$calls
END
done
printf '%s' "$message" | jq -r '.content'
