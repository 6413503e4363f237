"""A tiny chat model: bytes, three control tokens, and a template."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ffmem.models.load import load
from ffmem.models.memories import Memories
from ffmem.models.tokenizer import SubwordTokenizer
from tests.tiny import EXPERTS, TINY, shaken

CONTROLS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer(template: str | None = CHATML) -> SubwordTokenizer:
    """Return a tokenizer of single bytes with control tokens and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate([*CONTROLS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROLS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.chat_template = template
    return SubwordTokenizer(fast)


def chat_model(name: str = "llama") -> PreTrainedModel:
    """Return a random model of bytes that reads 256 tokens."""
    config = (TINY | EXPERTS)[name]
    sizes = {"vocab_size": 259, "max_position_embeddings": 256}
    return shaken(AutoModelForCausalLM.from_config(config.from_dict(config.to_dict() | sizes)))


def chat_memories(name: str = "llama", template: str | None = CHATML) -> Memories:
    """Return the memories of a tiny chat model."""
    return load(chat_model(name), chat_tokenizer(template))
