"""A tokenizer that shares no vocabulary with `tests.tiny`'s: one id for each byte of UTF-8."""

from pathlib import Path

BEGIN, END, FIRST_BYTE = 0, 1, 2


def byte_tokenizer(directory: Path, begins: bool = True) -> Path:
    """Ids: `<begin>` (put before each text, unless `begins` is false), `</end>`, then the 256 bytes in order."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    symbols = bytes_to_unicode()
    vocabulary = {"<begin>": BEGIN, "</end>": END} | {symbols[byte]: FIRST_BYTE + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "</end>"])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", BEGIN)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<begin>", eos_token="</end>", pad_token="</end>")
    fast.save_pretrained(directory)
    return directory


def byte_ids(text: str) -> list[int]:
    """The ids of a text, without special ones."""
    return [FIRST_BYTE + byte for byte in text.encode()]
