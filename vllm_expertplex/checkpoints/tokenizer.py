"""A byte-level BPE tokenizer trained on the Python sources of the installed vLLM.

ExpertPlex pins vLLM's version, so the text, and with it every token id, is the same everywhere.
"""

from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = 0, 1
_SPECIAL = [BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def source_files() -> list[Path]:
    """The training text: vLLM's scheduler and entrypoint modules, in a fixed order.

    Raises RuntimeError when vLLM is not installed.
    """
    spec = find_spec("vllm")  # finds the package without importing it
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(
            "the tokenizer is trained on vLLM's own sources, and no `vllm` package was found: "
            "install ExpertPlex with its `cpu` or `cuda` extra"
        )
    root = Path(spec.submodule_search_locations[0])
    return sorted([*(root / "v1" / "core").glob("*.py"), *(root / "entrypoints").rglob("*.py")])


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer (about two seconds): `VOCAB_SIZE` ids, every one of which decodes."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train([str(path) for path in source_files()], trainer)
    if bpe.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(
            f"the tokenizer has {bpe.get_vocab_size()} entries, not {VOCAB_SIZE}: "
            "the installed vLLM has too few source files; reinstall it"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=8192,
        chat_template=_CHAT_TEMPLATE,
    )
