"""The pretrained model of examples/smollm: `echo2 run` beside TRL's GRPOTrainer, to a held-out reward of .7.

    make .venv-trl/.installed outputs/models/smollm2/config.json outputs/data/facts/heldout.jsonl     # once
    make bench-smollm_trl               # three seeds; some two hours on two idle cores
    make bench-smollm_trl ARGS='--seeds 0 --steps 2 --save-every 1 --samples 1 --trl-threads 2'     # a try

`time_to_accuracy.py` does the work and says how time is counted; this is that, with the model, rows, groups, rate and
reward of examples/smollm/json.toml, and a point of both curves every second step. TRL gets the better of one and two
threads; echo2 has a thread for the learner and one for the worker. A checkpoint of 1.6 GB for each point is inside
echo2's clock; TRL's weights are outside its own.
"""

from __future__ import annotations

import sys

import time_to_accuracy

from echo2.core.errors import UserError

DEFAULTS = ["--config", str(time_to_accuracy.REPOSITORY / "examples" / "smollm" / "json.toml")]
DEFAULTS += ["--steps", "12", "--save-every", "2", "--threshold", "0.7", "--samples", "2"]

if __name__ == "__main__":
    try:
        time_to_accuracy.main([*DEFAULTS, *sys.argv[1:]], "smollm_trl")
    except UserError as error:
        sys.exit(f"error: {error}")
