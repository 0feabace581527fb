"""The commands that rent a machine of the market: SkyPilot's names of providers, places and GPUs, and its options.

SkyPilot has names of its own, some of them different at each provider, and rents nothing under another one. A machine
that it has no name for, or whose name there also means a smaller or slower GPU, has no command here; somebody rents it
by hand (docs/launch.md). `tests/foreign/test_recipes.py` asks SkyPilot's optimizer for each command.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo2.config.offers import Offer
from echo2.head.fleet.machines import filled

#: Arguments of a worker whose cards sample together (docs/engines.md); its machine needs vLLM.
TOGETHER = "--engine vllm --device cuda --engine-args=--tensor-parallel-size={}"
#: SkyPilot's names of gpuhunt's providers. It rents from no other ones of these.
_CLOUDS = {
    "aws": "aws",
    "azure": "azure",
    "digitalocean": "do",
    "gcp": "gcp",
    "lambdalabs": "lambda",
    "nebius": "nebius",
    "oci": "oci",
    "runpod": "runpod",
    "seeweb": "seeweb",
    "vastai": "vast",
    "verda": "verda",
}
#: SkyPilot's names of GPUs, everywhere and at one provider, where they are not ours without the hyphen of "RTX-".
#: "": its name there also means another kind or less memory (Vast.ai's "A100" has 40 or 80 GB).
_ACCELERATORS = {
    "A100-40GB": "A100",
    "H100-PCIe": "",
    "RTX-4060-Ti": "",
    "V100": "V100-32GB",
    ("lambda", "RTX-A6000"): "A6000",
    ("runpod", "H100"): "H100-SXM",
    ("runpod", "H100-PCIe"): "H100",
    ("runpod", "H200"): "H200-SXM",
    ("vast", "A100-40GB"): "",
    ("vast", "A100-80GB"): "",
    ("vast", "V100"): "",
}


def rent_command(provider: str, region: str, gpu: str, cards: int, spot: bool, usd_per_hour: float) -> str:
    """Return the `rent` of an offer (`filled` gives it a name); "" if SkyPilot cannot rent just this machine.

    `provider` and `region` are gpuhunt's, "any" for a place that does not matter; `usd_per_hour` of all `cards`.
    """
    infra, kind = _infra(provider, region), _accelerator(provider, gpu)
    if not infra or not kind:
        return ""
    market = "--use-spot" if spot else "--no-use-spot"
    together = f'--env ECHO2_WORKER_ARGS="{TOGETHER.format(cards)}" ' if cards > 1 else ""
    return (
        f"sky launch -d -y -c {{name}} --infra {infra} --gpus {kind}:{cards} {market} "
        f"--env ECHO2_MACHINE={{name}} --env ECHO2_PRICE_USD_PER_HOUR={usd_per_hour:g} {together}"
        "--secret ECHO2_TICKET launch/skypilot.yaml"
    )


def _accelerator(provider: str, gpu: str) -> str:
    cloud = _CLOUDS.get(provider, "")
    return _ACCELERATORS.get((cloud, gpu), _ACCELERATORS.get(gpu, gpu.replace("RTX-", "RTX")))


def _infra(provider: str, region: str) -> str:
    """gpuhunt's places are zones of Google's and data centres of RunPod's, which are SkyPilot's zones; Vast.ai's are
    written otherwise there.
    """
    cloud = _CLOUDS.get(provider, "")
    if not cloud or region == "any":
        return cloud
    if cloud == "gcp":
        return f"gcp/{region.rpartition('-')[0]}/{region}"
    if cloud == "runpod" and "-" in region:
        return f"runpod/*/{region}"
    return "" if cloud == "vast" else f"{cloud}/{region}"


def rent_commands(offers: Sequence[Offer], machines: dict[str, int]) -> str:
    """Return the commands that rent exactly these machines, and those that give them back."""
    lines, back = ['export ECHO2_TICKET="$(cat outputs/RUN/ticket)"'], []
    for offer in offers:
        if not (count := machines.get(offer.name, 0)):
            continue
        loop = f"for n in $(seq {count}); do"
        name = f"{offer.name}-$n"
        if offer.rent:
            values = {"name": name, "offer": offer.name, "ticket": '"$ECHO2_TICKET"'}
            lines.append(f"{loop} {filled(offer.rent, values)}; done")
            back.append(f"{loop} {filled(offer.release, values)}; done")
        else:
            lines.append(f"# {count} x {offer.name}: on each of them, `bash launch/worker.sh` (docs/launch.md)")
    return "\n".join([*lines, *(["# and back:", *back] if back else [])])
