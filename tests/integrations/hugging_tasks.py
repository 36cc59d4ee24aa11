"""Tasks of transformers: a tiny random model, a dataset and the collator that belong together."""

import torch

from oracles.hugging import bart, bert, gpt2, llama, quiet, t5, vit

SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.2,
}


def tokenizer(side="right"):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2} | {f"w{n}": n for n in range(3, 20)}
    split = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=split,
        pad_token="[PAD]",
        eos_token="[PAD]",
        mask_token="[MASK]",
        unk_token="[UNK]",
        padding_side=side,
    )


def bert_for(kind, **options):
    import transformers

    config = transformers.BertConfig(**SIZES, max_position_embeddings=16, **options)
    return getattr(transformers, f"BertFor{kind}")(config)


def audio():
    from transformers import ASTConfig, ASTForAudioClassification

    frames = {"max_length": 16, "num_mel_bins": 8, "patch_size": 4}
    strides = {"frequency_stride": 4, "time_stride": 4, "num_labels": 3}
    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    return ASTForAudioClassification(ASTConfig(**sizes, **frames, **strides))


def texts(count=13):
    """Token lists of different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
    return [torch.randint(3, 20, (n,), generator=generator).tolist() for n in lengths]


def sequences():
    from transformers import DataCollatorWithPadding

    data = [{"input_ids": ids, "label": n % 3, "note": "unused"} for n, ids in enumerate(texts())]
    return quiet(bert), data, DataCollatorWithPadding(tokenizer())


def tokens():
    from transformers import DataCollatorForTokenClassification

    data = [{"input_ids": ids, "labels": [i % 3 for i in ids]} for ids in texts()]
    model = quiet(lambda: bert_for("TokenClassification", num_labels=3))
    return model, data, DataCollatorForTokenClassification(tokenizer())


def images():
    data = [{"pixel_values": torch.randn(1, 8, 8), "label": n % 3} for n in range(13)]
    return quiet(vit), data, None


def sounds():
    data = [{"input_values": torch.randn(16, 8), "label": n % 3} for n in range(13)]
    return quiet(audio), data, None


def causal(make, side="right"):
    from transformers import DataCollatorForLanguageModeling

    data = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts()]
    return quiet(make), data, DataCollatorForLanguageModeling(tokenizer(side), mlm=False)


def masked():
    from transformers import DataCollatorForLanguageModeling

    data = [{"input_ids": ids} for ids in texts()]
    collator = DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.4)
    return quiet(lambda: bert_for("MaskedLM")), data, collator


def sequence_to_sequence(make, with_model):
    from transformers import DataCollatorForSeq2Seq

    model = quiet(make)
    data = [{"input_ids": ids, "labels": ids[::-1][:5]} for ids in texts()]
    return model, data, DataCollatorForSeq2Seq(tokenizer(), model=model if with_model else None)


TASKS = {
    "sequence classification": sequences,
    "token classification": tokens,
    "image classification": images,
    "audio classification": sounds,
    "causal LM, GPT-2": lambda: causal(gpt2),
    "causal LM, GPT-2 padded on the left": lambda: causal(gpt2, "left"),
    "causal LM, Llama": lambda: causal(llama),
    "masked LM": masked,
    "seq2seq, T5": lambda: sequence_to_sequence(t5, with_model=True),
    "seq2seq, T5 without decoder inputs": lambda: sequence_to_sequence(t5, with_model=False),
    "seq2seq, BART without decoder inputs": lambda: sequence_to_sequence(bart, with_model=False),
}


def sharpened(model):
    """The model with larger output weights, so that shifted labels have another loss."""
    head = model.get_output_embeddings()
    if head is not None:
        with torch.no_grad():
            head.weight.mul_(20)
    return model
