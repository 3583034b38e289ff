"""The texts of `--help`, which fits on one screen, and of `--help all`, which lists every key."""

import textwrap
from collections.abc import Iterable, Sequence

from foundations.values import Key, shown
from launcher_scripts.configuration.diagnosis import files_of_group
from launcher_scripts.configuration.schema import GROUPS, KEYS
from launcher_scripts.configuration.settings import PROGRAM

_USAGE = """\
Slipway takes a trained language-model checkpoint to a served, measured Triton endpoint.

usage: PROGRAM [group=file ...] [key=value ...] [options]

stages (in this order; missing prerequisites run first, finished work is skipped)
  convert     checkpoint -> FasterTransformer shards        <triton_model_dir>/1/<TP>-gpu
              (convert.format=huggingface, peft: for others) <triton_model_dir>/1/<format>
  certify     checkpoint and folder -> proof or difference  results/certify/certificate.html
  export      shards -> Triton repository                   config.pbtxt of every model
  deploy      repository -> running server, until Ctrl-C    deploy/endpoint.json
  evaluate    server -> accuracy, latency, report           results/evaluate/report.html

examples
  PROGRAM export=gpt3/sample                            everything, with the bundled model
  PROGRAM export=gpt3/sample dry_run=true               show every job; start nothing
  PROGRAM 'stages=[export]' export.run.model_train_name=gpt3_5b \\
      export.model.checkpoint_path=/models/gpt3_5b.nemo \\
      export.model.tensor_model_parallel_size=4         a repository from a checkpoint
  PROGRAM export=gpt3/sample 'stages=[deploy]'          a server, until Ctrl-C
  PROGRAM action=status                                 the last run; also logs and cancel
  PROGRAM action=watch export.run.training_dir=/runs/a  each checkpoint, while training runs
  PROGRAM action=upgrade 'upgrade.rows={now:{},next:{deploy.executable:/next/vllm}}'
                                                        two versions on the same samples, judged

options
  --help KEY ...           what a key means, or every key of a section such as deploy.openai
  --help all               every key, with its meaning, and the files to choose from
  --cfg job                the configuration
  --multirun key=1,2       one run for each value
  --config-dir DIR         look for further configuration files here
  --config-path FOLDER --config-name FILE    another root; a saved *_config.yaml repeats its run
  --version                this project's version

exit status
  0 done   1 a stage failed   2 the configuration is wrong, nothing was started
  3 a bound of evaluate.gate is breached   4 the evaluation could not be done
  5 more samples are needed to decide a bound   130 interrupted
"""

_WELCOME = """\
Welcome to Slipway, which takes a trained language-model checkpoint to a served, measured endpoint.

To begin, type one of these:
  PROGRAM export=gpt3/sample                    the whole job with the bundled model
  PROGRAM export=gpt3/sample 'stages=[deploy]'  a server of it, until Ctrl-C
  PROGRAM --help                                the stages, examples and options

For a model of your own, name it and its checkpoint:
  PROGRAM export.run.model_train_name=NAME export.model.checkpoint_path=PATH
"""


def welcome() -> str:
    """Return the answer to a call without arguments."""
    return _WELCOME.replace("PROGRAM", PROGRAM)


def help_text(*, everything: bool) -> str:
    """Return usage and examples; with `everything`, also the configuration files and all keys."""
    usage = _USAGE.replace("PROGRAM", PROGRAM)
    if not everything:
        return usage
    lines = [usage]
    lines += ["files to choose from (group=file; the first of conf/config.yaml is the default)"]
    lines += [f"  {group:<10}{', '.join(files_of_group(group))}" for group in GROUPS]
    lines += ["", "keys (--cfg job shows their values; a list is written 'key=[a,b]')"]
    return "\n".join([*lines, *_key_lines(KEYS.values())]) + "\n"


def help_of(names: Sequence[str]) -> str:
    """Return the meaning of each key in `names`, and of every key of each section in it."""
    wanted = tuple(f"{name}." for name in names)
    keys = (key for key in KEYS.values() if f"{key.name}.".startswith(wanted))
    return "\n".join(_key_lines(keys)) + "\n"


def _key_lines(keys: Iterable[Key]) -> list[str]:
    lines = []
    section = None
    for key in keys:
        group, _, leaf = key.name.rpartition(".")
        if group != section:
            section = group
            lines.append(f"  {group}." if group else "  (root)")
        text = key.text
        if key.choices:
            text += f" [{', '.join(map(shown, key.choices))}]"
        wrapped = textwrap.wrap(text, 62)
        lines.append(f"    {leaf:<30}{wrapped[0]}")
        lines += [" " * 34 + line for line in wrapped[1:]]
    return lines
