"""Opening of a training job's environments and tools."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.configs.grpo import GRPOSettings, RolloutSettings
from mindrlhf.configs.vision import VisionConfig
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.data.tool_formats import load_tool_format
from mindrlhf.data.turns import TurnTemplate
from mindrlhf.environments.contents import ContentWriter
from mindrlhf.environments.conversations import Conversations
from mindrlhf.environments.pool import NO_IMAGES, EnvironmentPool
from mindrlhf.environments.protocol import READY
from mindrlhf.environments.ready.code_interpreter import describe
from mindrlhf.models.axes import TENSOR
from mindrlhf.parallel.partition import Partition
from mindrlhf.rollout.partner import Partner, SharedPartner

ONLY = "environment"  # name of a single environment


def open_partner(
    config: GRPOSettings,
    tokenizer: Tokenizer,
    generating: Partition | None,
    collectives: Collectives,
    stack: ExitStack,
) -> Partner | None:
    """Open the partner of conversations on ranks that generate; None without one.

    generating: this rank's part of the model that generates. The partner runs on the first rank of each replica.
    `stack` ends its processes. Raises UserError for environments, tools and chat templates that do not work.
    """
    settings = config.rollout
    if not settings.converses:
        return None
    if not generating:
        return None
    own = None
    if generating.first_of_replica:
        variables = config.data.chat_template_kwargs
        own = open_conversations(settings, tokenizer, config.seed, stack, variables, generating.model.vision)
    group = generating.mesh.group(collectives.world.rank, TENSOR)
    return SharedPartner(own, lambda value: collectives.broadcast_object(value, group[0], group)) if group[1:] else own


def sandbox_note(settings: RolloutSettings) -> str | None:
    """Say what holds a model's code here; None without the tool."""
    code = {READY["python"], "python"}
    return f"code of the tool python: {describe()}" if code.intersection(settings.tools) else None


def open_conversations(
    settings: RolloutSettings,
    tokenizer: Tokenizer,
    seed: int,
    stack: ExitStack,
    variables: Mapping[str, Any] | None = None,
    vision: VisionConfig | None = None,
) -> Conversations:
    """Open conversations in this process; `stack` ends their processes.

    variables: of the chat template. vision: of a model that sees. Raises UserError.
    """
    own = {"variables": variables, "for_tools": bool(settings.tools)}
    template = TurnTemplate(tokenizer, tool_format=load_tool_format(settings.tool_format), **own)
    shown = vision if settings.tool_images else None
    writer = ContentWriter(template, shown and shown.image_text(tokenizer.id_to_token), shown)
    given = settings.environment or ""
    pool = EnvironmentPool(
        given if isinstance(given, dict) else {ONLY: given},
        settings.tools,
        workers=settings.tool_workers,
        timeout_s=settings.tool_timeout_s,
        memory_mb=settings.tool_memory_mb,
        sandbox=settings.sandbox,
        images=shown and shown.images,
        no_images="rollout.tool_images is False; set it to True" if vision else NO_IMAGES,
    )
    stack.enter_context(pool)

    def text(ids):
        return tokenizer.decode(list(ids), skip_special_tokens=True)

    return Conversations(pool, template, text, seed, settings.max_turns, writer)
