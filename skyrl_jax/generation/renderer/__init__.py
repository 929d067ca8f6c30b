"""Messages + tools <-> token ids, incrementally: what was sampled is never rendered again.

chatml.py     the built-in form of the tiny policy
template.py   a model's own chat template, rendered as transformers renders it
encode.py     rendered text -> ids; special strings in other people's text stay ordinary text
follow.py     what a template writes after an assistant turn, at the cost of the new messages alone
rendered.py   the Renderer made of these three
formats/      what a model says: reasoning and tool calls, read from its text
folder.py     the template and the tokens of a Hugging Face folder
matrix.py     which parts of a template are append-only, and what that means for training
"""

from skyrl_jax.generation.renderer.chatml import ROLES, ChatMLRenderer
from skyrl_jax.generation.renderer.folder import open_renderer
from skyrl_jax.generation.renderer.rendered import TemplateRenderer
from skyrl_jax.generation.renderer.template import ChatTemplate

AnyRenderer = ChatMLRenderer | TemplateRenderer

__all__ = [
    "ROLES",
    "AnyRenderer",
    "ChatMLRenderer",
    "ChatTemplate",
    "TemplateRenderer",
    "open_renderer",
]
