"""The ECHO-2 headline on paper: Qwen3-30B-A3B on DAPO-17k, four H200 learning, workers of four kinds at the market's
prices. Published: 9.5 h and $425; the same job at Fireworks 124 h and $4,490, at Tinker 23.5 h and $1,122.

The press release says neither how long answers are, nor how many steps, nor the size of a group. Taken here: one pass
over 17,398 problems, 128 a step; groups of 16; answers of 4,000 tokens on average, 8,192 at most. Each is varied by
20 %, and so are the estimated seconds of a step and rates of machines, their prices, and how fast links are. Workers
sample as many groups at once as their memory holds; of cards for games a machine has four, and one copy of the model.
Table 2 of the paper goes through the same planner.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from plots import COLOURS, INK, require_matplotlib
from recording import save

from echo2.cli import main as echo2
from echo2.config import load
from echo2.config.offers import Offer
from echo2.head.fleet.decide import formulas
from echo2.planning.first_plan import FirstPlan
from echo2.planning.market import MachineFilter, known_prices, market_offers
from echo2.planning.plan import make_plan
from echo2.planning.plan_inputs import BroadcastInputs, PlanInputs

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "gpu" / "qwen3_30b_a3b.toml"
#: What config.json of Qwen3-30B-A3B says, so that no hub is asked.
MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
PUBLISHED = {"ECHO-2": (9.5, 425.0), "Tinker": (23.5, 1122.0), "Fireworks": (124.0, 4490.0)}
PROMPTS, GROUPS = 17_398, 128
#: What is varied; the last six are factors of what is estimated or assumed.
ASSUMED = {
    "answer": 4000.0,
    "steps": PROMPTS / GROUPS,
    "group": 16.0,
    **dict.fromkeys(("price", "train", "rate", "wage", "links", "uplink"), 1.0),
}
TOLD = {
    "answer": "tokens of an answer",
    "steps": "steps",
    "group": "rollouts of a group",
    "price": "learner's price",
    "train": "seconds of a step",
    "rate": "rate of a machine",
    "wage": "price of a machine",
    "links": "links of machines",
    "uplink": "uplink of the head",
}
#: GPU, whether spot, and the groups that one samples at once: what fits beside the weights.
WORKERS = {
    "H200": ("H200", "no", 4),
    "A100 80 GB, spot": ("A100-80GB", "yes", 1),
    "4 x RTX 5090": ("4xRTX-5090", "any", 1),
    "4 x RTX 4090": ("4xRTX-4090", "any", 1),
    "RTX 5090": ("RTX-5090", "any", 1),
    "RTX 4090": ("RTX-4090", "any", 1),
}
#: The learner's price: four H200 of the market.
LEARNER_USD_PER_HOUR = 4 * 3.5
#: Rows of table 2: machines, T_bcast, and what is fitted: the rate and price of a machine (simulations/table2.toml).
TABLE_2 = {
    "full": (9, 1437.0, 0.2909, 0.6258, 8.098),
    "no relays, 9": (9, 1830.0, 0.311, 0.6273, 8.432),
    "no relays, 10": (10, 1872.0, 0.3003, 0.6328, 8.630),
    "no cost": (9, 1437.0, 0.2909, 0.9302, 9.339),
}


def planned(model: Path, kind: str, values: dict[str, float], *flags: str) -> dict[str, Any]:
    """What `echo2 plan` prints as JSON for these workers, or its refusal as `error`."""
    name, spot, at_once = WORKERS[kind]
    words = ["plan", str(CONFIG), "--learner", "4xH200", "--gpus", name, "--spot", spot, "--each", "256", "--json"]
    settings = {
        "model.path": model,
        "learner.ranks": 4,
        "learner.price_usd_per_hour": LEARNER_USD_PER_HOUR * values["price"],
        "run.max_steps": round(values["steps"]),
        "sampling.group_size": round(values["group"]),
        "sampling.groups_per_batch": at_once,
        "sampling.max_tokens": 8192,
        "schedule.groups_per_step": GROUPS,
    }
    words += ["--answer-tokens", f"{values['answer']:g}", "--uplink-mbps", f"{1000 * values['uplink']:g}", *flags]
    overrides = {key: str(value) for key, value in settings.items()}
    first = FirstPlan(load(CONFIG, overrides), "4xH200", values["answer"])
    if values["train"] != 1.0:
        words += ["--train-seconds", f"{first.train_seconds()[0] * values['train']:g}"]
    if {values["rate"], values["wage"], values["links"]} != {1.0}:
        offers, _ = first.offers(market_offers(known_prices()[0], MachineFilter(spot=spot, gpus=(name,), count=256)))
        (model / "offers.toml").write_text("".join(varied_offer(one, values) for one in offers))
        words += ["--offers", str(model / "offers.toml")]
    words += [word for key, value in overrides.items() for word in (f"--{key}", value)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = echo2(words)
    return dict(json.loads(out.getvalue() if status == 0 else err.getvalue()))


def varied_offer(offer: Offer, values: dict[str, float]) -> str:
    """The offer with its estimated rate, for an offers file."""
    changed = {
        "rollouts_per_second": (offer.rollouts_per_second or 0.0) * values["rate"],
        "price_usd_per_hour": offer.price_usd_per_hour * values["wage"],
        "up_mbps": offer.up_mbps * values["links"],
        "down_mbps": offer.down_mbps * values["links"],
    }
    kept = ("name", "gpu", "count", "memory_gb", "reliability", "mean_life_hours", "replace_seconds")
    fields = {**{field: getattr(offer, field) for field in kept}, **changed}
    return "[[offers]]\n" + "".join(f"{field} = {json.dumps(value)}\n" for field, value in fields.items())


def in_short(plan: dict[str, Any]) -> dict[str, Any]:
    """Hours, dollars and what limits them."""
    if "error" in plan:
        return {"refused": plan["error"].partition(" A plan that works")[0]}
    hours, steps_per_hour = plan["prediction"]["run_seconds"] / 3600, 3600 / plan["prediction"]["step_seconds"]
    found = {
        "hours": round(hours, 1),
        "usd": round(plan["usd"]),
        "machines": plan["machines"],
        "steps_per_hour": round(steps_per_hour, 1),
        "set_by": f"the pace by the {plan['binds']}, the machines by the {plan['fleet_set_by']}",
        "usd_per_step_range": [round(one, 2) for one in plan["range"]["usd_per_step"]],
    }
    if plan["rehearsal"]:
        simulated = plan["rehearsal"]
        found["simulated_idle"] = round(simulated["steady_idle_ratio"], 3)
        found["simulated_usd"] = round(simulated["usd_per_step"] * plan["usd"] / plan["usd_per_step"])
    return found


def table_2() -> dict[str, dict[str, Any]]:
    """The paper's four fleets through the planner: each has its machines, whether they suffice or not."""
    rows = {}
    for label, (count, seconds, rate, price, published) in TABLE_2.items():
        inputs = PlanInputs(
            groups_per_step=128,
            group_size=16,
            steps=100,
            max_staleness=3,
            publish_every=2,
            train_seconds=1631.2,
            offers=(Offer("machine", price, rate, count=count),),
            broadcast=BroadcastInputs(seconds=seconds),
            learner_usd_per_hour=12.24,
            groups_per_batch=1,
            generate_during_broadcast=False,
        )
        needed = formulas.mu_needed(inputs.demand(3, 2, seconds))
        plan = make_plan(replace(inputs, max_idle=0.2, gamma=(count - 0.5) * rate / needed))  # as many as the row has
        usd, idle = plan.usd_per_step, plan.prediction.steady_idle_ratio
        rows[label] = {"machines": plan.machines["machine"], "usd": round(usd, 3), "published": published, "idle": idle}
        print(f"table 2, {label}: {plan.machines['machine']} machines, ${usd:.3f} a step (published {published})")
    return rows


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the dollars of the run with each input a fifth smaller and larger, the widest range on top."""
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "echo2"
    ends = [(*(found["varied"][f"{name} x {factor}"]["usd"] for factor in ("0.8", "1.2")), TOLD[name]) for name in TOLD]
    ends.sort(key=lambda one: abs(one[1] - one[0]))
    middle = found["rows"]["H200"]["usd"]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for place, (low, high, _) in enumerate(ends):
        axes.barh(place, low - middle, left=middle, color=COLOURS[0], label="20 % less" if not place else None)
        axes.barh(place, high - middle, left=middle, color=COLOURS[1], label="20 % more" if not place else None)
        axes.text(min(low, high), place, f"${low} ", ha="right", va="center", color=INK)
        axes.text(max(low, high), place, f" ${high}", ha="left", va="center", color=INK)
    axes.set_yticks(range(len(ends)), [name for _, _, name in ends])
    axes.axvline(middle, color=INK, linewidth=1)
    axes.margins(x=0.15)
    axes.set_xlabel(f"dollars of the run, ${middle} as assumed", color=INK)
    axes.tick_params(colors=INK)
    axes.spines[:].set_color(INK)
    axes.legend(frameon=False, labelcolor=INK, loc="lower right")
    figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    parser.add_argument("--rehearse", action="store_true", help="simulate each plan, too")
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("RESULTS", "SVG"), help="draw a result file, and end")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.draw[0].read_text()), options.draw[1])
        return
    for name, (hours, usd) in PUBLISHED.items():
        print(f"published, {name}: {hours:g} h, ${usd:g}")
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(MODEL))
        for kind in WORKERS:
            rows[kind] = in_short(planned(model, kind, ASSUMED, *(["--rehearse"] if options.rehearse else [])))
            print(f"{kind}: {rows[kind]}")
        varied: dict[str, Any] = {}
        for name, value in ASSUMED.items():
            for factor in (0.8, 1.2):
                found = in_short(planned(model, "H200", {**ASSUMED, name: value * factor}))
                varied[f"{name} x {factor:g}"] = found
                print(f"H200, {name} x {factor:g}: {found.get('hours')} h, ${found.get('usd')}")
    _, prices = known_prices()
    found = {"prices": prices, "published": PUBLISHED, "rows": rows, "varied": varied, "table_2": table_2()}
    save("headline", found, options.out)


if __name__ == "__main__":
    main()
