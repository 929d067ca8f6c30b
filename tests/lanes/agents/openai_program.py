"""An agent loop on the official openai client; it runs inside its own sandbox."""

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import calls  # noqa: E402
import openai  # noqa: E402

SYSTEM = "Repair the repository in the current folder. Use bash; call submit when you are done."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command in a shell.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "submit",
            "description": "End the work.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]


def streamed(client, messages):
    """Ask with stream=True and put the message together, as a user's own script would."""
    content, found = "", {}
    answer = client.chat.completions.create(
        model="policy", messages=messages, tools=TOOLS, stream=True
    )
    for chunk in answer:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                call = found.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                call["id"] = part.id or call["id"]
                if part.function is not None:
                    call["name"] += part.function.name or ""
                    call["arguments"] += part.function.arguments or ""
    return content, [found[index] for index in sorted(found)]


def main():
    job = json.loads((HERE / "task.json").read_text())
    client = openai.OpenAI(max_retries=0)
    system = {"role": "system", "content": SYSTEM}
    messages = [system, {"role": "user", "content": job["task"]}]
    while True:
        content, tool_calls = streamed(client, messages)
        message = {"role": "assistant", "content": content}
        if tool_calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in tool_calls
            ]
        messages.append(message)
        if not tool_calls:
            messages.append({"role": "user", "content": "Call a tool."})
        for call in tool_calls:
            if call["name"] == "submit":
                print(json.dumps({"exit": "submit"}), flush=True)
                return
            command = json.loads(call["arguments"])["command"]
            code, output = calls.run(["bash", "-c", command], cwd=job["cwd"])
            text = f"{output[-4000:]}\n[exit code {code}]"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


if __name__ == "__main__":
    try:
        main()
    finally:
        sys.stdout.flush()
        os._exit(0)
