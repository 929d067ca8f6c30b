"""Run the OpenHands SDK, as its package is, on one task; starts inside the agent's sandbox.

Its agent gets the SDK's own finish tool and a bash tool (made by the SDK's interface for custom
tools) that runs in the episode's sandbox. ``task.json``: {"task": text, "cwd": folder} and, where
the SDK's own system prompt is too long for a policy, "system_prompt". The last line printed is
{"exit": "finish"}, or another status where the agent did not call finish.
"""

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import calls  # noqa: E402
from openhands.sdk import (  # noqa: E402
    LLM,
    Action,
    Agent,
    Conversation,
    Observation,
    TextContent,
    ToolDefinition,
)
from openhands.sdk.tool import Tool, ToolExecutor, register_tool  # noqa: E402
from pydantic import Field, SecretStr  # noqa: E402

JOB = json.loads((HERE / "task.json").read_text())
SHOWN = 20_000  # characters of one output


class BashAction(Action):
    """A command."""

    command: str = Field(description="The bash command to run.")


class BashObservation(Observation):
    """What it printed."""


class BashExecutor(ToolExecutor):
    """Runs commands where the task lies."""

    def __call__(self, action, conversation=None):
        """Run one command; its exit code is told at the end of its output."""
        code, output = calls.run(["bash", "-c", action.command], cwd=JOB["cwd"])
        text = f"{output[-SHOWN:]}\n[exit code {code}]"
        return BashObservation(content=[TextContent(text=text)], is_error=code != 0)


class BashTool(ToolDefinition):
    """The SDK's custom tool."""

    @classmethod
    def create(cls, conv_state=None, **params):
        """Return the one tool."""
        return [
            cls(
                description="Run a command in a shell of the repository. There is no network.",
                action_type=BashAction,
                observation_type=BashObservation,
                executor=BashExecutor(),
            )
        ]


def main():
    """Run the agent until it calls finish."""
    finished = []

    def watch(event):
        if type(getattr(event, "action", None)).__name__ == "FinishAction":
            finished.append(event)

    register_tool("BashTool", BashTool)
    llm = LLM(
        usage_id="agent",
        model="openai/policy",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=SecretStr(os.environ["OPENAI_API_KEY"]),
        num_retries=1,
        temperature=None,
    )
    own = {"system_prompt": JOB["system_prompt"]} if JOB.get("system_prompt") else {}
    agent = Agent(llm=llm, tools=[Tool(name="BashTool")], **own)
    conversation = Conversation(agent=agent, workspace="/tmp", callbacks=[watch], visualizer=None)
    conversation.send_message(JOB["task"])
    try:
        conversation.run()
    finally:
        print(json.dumps({"exit": "finish" if finished else "stopped"}), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # no telemetry or logging thread keeps the sandbox waiting
