#!/usr/bin/env bash
# PEFT 0.21.2: add_weighted_adapter with half of each of two adapters does not give their mean, nor DoRA with 1 itself.
#
# Expected: the combination "linear" of adapters B1 A1 and B2 A2 with weights w1 and w2 updates the model by
#   w1 B1 A1 + w2 B2 A2, as task arithmetic does and as "cat" does; one adapter with the weight 1 stays what it is.
# Seen: "linear" scales the A and the B by roots of the weights, adds them up and multiplies the sums, so that B1 meets A2 and
#   B2 meets A1: two random adapters differ from their mean by almost its size. Of DoRA, whose magnitudes have no place in the
#   result, not even one adapter with the weight 1 is left as it was. There is no error or warning.
# Matters for: adapters that are merged with each other before they are merged into the model. "ties", "dare_linear" and
#   "magnitude_prune" add up A and B in the same way; "cat", with the sum of all ranks, is exact for a plain LoRA.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from peft import LoraConfig, get_peft_model

PLAIN, DORA = LoraConfig(r=4, target_modules=["0"]), LoraConfig(r=4, target_modules=["0"], use_dora=True)
x = torch.eye(16)


def adapted(settings):
    """Return what gives the update of a model's matrix by a combination of two random adapters, and by one of them."""
    torch.manual_seed(0)
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False)), settings, adapter_name="one")
    model.add_adapter("two", settings)
    for name, values in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.uniform_(values)
    with torch.no_grad(), model.disable_adapter():
        base = model(x)

    @torch.no_grad()
    def update(names, weights, kind):
        name = f"{kind} of {len(model.peft_config)}"
        model.add_weighted_adapter(names, weights, name, combination_type=kind)
        model.set_adapter(name)
        return model(x) - base

    @torch.no_grad()
    def of(name):
        model.set_adapter(name)
        return model(x) - base

    return update, of


def equal(left, right):
    return torch.allclose(left, right, rtol=1e-3, atol=1e-3)


update, of = adapted(PLAIN)
one, two = of("one"), of("two")
print("linear, one with 1: as it was", equal(update(["one"], [1.0], "linear"), one))
for kind in ("linear", "cat"):
    for label, weights in (("half of each: mean", [0.5, 0.5]), ("one minus two: difference", [1.0, -1.0])):
        print(f"{kind}, {label}", equal(update(["one", "two"], weights, kind), weights[0] * one + weights[1] * two))
update, of = adapted(DORA)
one = of("one")
print("linear, DoRA with 1: as it was", equal(update(["one"], [1.0], "linear"), one))
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check peft==0.21.2 transformers==5.24.0 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" 2>/dev/null)
printf 'PEFT 0.21.2:\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
linear, one with 1: as it was True
linear, half of each: mean False
linear, one minus two: difference False
cat, half of each: mean True
cat, one minus two: difference True
linear, DoRA with 1: as it was False
SEEN
