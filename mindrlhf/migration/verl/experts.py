"""Rules of the translation for experts."""

from mindrlhf.migration.verl.command import Keys
from mindrlhf.migration.verl.result import VerlTranslation
from mindrlhf.migration.verl.table import NAMES

ROUTER_REPLAY = tuple(f"actor.{engine}router_replay.mode" for engine in ("", "megatron.", "veomni."))


def routing(keys: Keys, result: VerlTranslation) -> None:
    """Translate the replay of experts' routing, which verl's engines have a key for, too."""
    mode = keys.first(*ROUTER_REPLAY)
    result.judge("needless", "generation records what training replays", "rollout.enable_rollout_routing_replay")
    if mode is None:
        return
    if keys(mode) in NAMES["routing_replay"]:
        result.put("rollout.routing_replay", NAMES["routing_replay"][keys(mode)], mode)
    else:
        result.refuse(mode, f"it is one of {', '.join(NAMES['routing_replay'])}")
