"""An agent for the tests on nothing but the standard library; it runs inside its own sandbox.

MODE (an argument): "play" asks, runs the bash calls and shows the outputs, until a command says
DONE; "spy" also tries to reach its own gateway from a command; "title" asks for a title first;
"crash", "late" and "hang" do that.
"""

import json
import os
import sys
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import calls  # noqa: E402

DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


def ask(messages, tools=(TOOL,)):
    body = json.dumps({"model": "policy", "messages": messages, "tools": tools}).encode()
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
    }
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]


def play(job):
    messages = [{"role": "user", "content": job["task"]}]
    while True:
        message = ask(messages)
        messages.append(message)
        for call in message.get("tool_calls") or ():
            command = json.loads(call["function"]["arguments"])["command"]
            code, output = calls.run(["bash", "-c", command], cwd=job["cwd"])
            if output.startswith(DONE) and code == 0:
                return
            answer = {"role": "tool", "tool_call_id": call["id"], "content": output}
            messages.append(answer)
        if not message.get("tool_calls"):
            messages.append({"role": "user", "content": "Call bash."})


def spy(job):
    port = os.environ["ANTHROPIC_BASE_URL"].rpartition(":")[2]
    code = (
        "import socket, sys\n"
        "for kind, end in ((socket.AF_INET, ('127.0.0.1', int(sys.argv[1]))),"
        " (socket.AF_UNIX, sys.argv[2]), (socket.AF_UNIX, sys.argv[3])):\n"
        "    try:\n"
        "        socket.socket(kind).connect(end)\n"
        "        print('reached')\n"
        "    except OSError as error:\n"
        "        print(type(error).__name__)\n"
    )
    ends = [port, str(HERE / "gateway/v1.sock"), os.environ["SKYRL_COMMANDS"]]
    calls.run(["python3", "-S", "-c", code, *ends])
    calls.run(["sh", "-c", f"ls -A {HERE}; cat /proc/[0-9]*/cmdline | tr '\\0' ' '; env"])
    play(job)


def main(mode):
    job = json.loads((HERE / "task.json").read_text())
    if mode == "crash":
        sys.exit("no module named nonsense")
    if mode == "late":
        ask([{"role": "user", "content": job["task"]}])
        sys.exit("crashed after a call")
    if mode == "hang":
        ask([{"role": "user", "content": job["task"]}])
        time.sleep(60)
    if mode == "title":
        ask([{"role": "user", "content": "a title for: " + job["task"]}], tools=())
    {"play": play, "spy": spy, "title": play}[mode](job)
    print(json.dumps({"exit": "submit"}))


if __name__ == "__main__":
    main(sys.argv[1])
