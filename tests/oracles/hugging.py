"""Tiny randomly initialised models of transformers, with every dropout rate set."""

import torch


def quiet(make):
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    return make().eval()


def bart():
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=20,
        d_model=8,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=16,
        dropout=0.1,
        attention_dropout=0.2,
        activation_dropout=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )
    return BartForConditionalGeneration(config)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            attention_dropout=0.2,
        )
    )


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=20,
            n_positions=16,
            n_embd=8,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.1,
            embd_pdrop=0.2,
            attn_pdrop=0.3,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=20,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.2,
            classifier_dropout=0.3,
            num_labels=3,
        )
    )


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=20,
            d_model=8,
            d_kv=4,
            d_ff=16,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.1,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=4,
            num_channels=1,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.2,
            num_labels=3,
        )
    )


def swin():
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(
        SwinConfig(
            image_size=16,
            patch_size=2,
            num_channels=1,
            embed_dim=8,
            depths=[2, 2],
            num_heads=[2, 2],
            window_size=4,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.2,
            drop_path_rate=0.3,
            num_labels=3,
        )
    )


PAIR = {"input_ids": "tokens", "decoder_input_ids": "tokens"}
TEXT = {"input_ids": "tokens"}
HUGGING = {
    "bart": (bart, PAIR),
    "llama": (llama, TEXT),
    "gpt2": (gpt2, TEXT),
    "bert": (bert, TEXT),
    "t5": (t5, PAIR),
    "vit": (vit, {"pixel_values": 8}),
    "swin": (swin, {"pixel_values": 16}),
}


def hugging_inputs(kinds, batch=3, time=5):
    return {
        name: torch.randint(3, 20, (batch, time))
        if kind == "tokens"
        else torch.randn(batch, 1, kind, kind)
        for name, kind in kinds.items()
    }
