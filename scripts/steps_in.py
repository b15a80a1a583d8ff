"""How many steps of a plan (`mindrlhf plan --json`) fit into some minutes: python scripts/steps_in.py PLAN MINUTES."""

import json
import sys
from pathlib import Path

plan, minutes = sys.argv[1:]
seconds = json.loads(Path(plan).read_text(encoding="utf-8"))["step_seconds"]
print(max(1, int(60 * int(minutes) / sum(seconds.values()))))
