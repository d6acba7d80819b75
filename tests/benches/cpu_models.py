"""The models of cpu.py: modules with random weights, batches of random data, and losses as a PyTorch user writes them."""

import torch
import torch.nn.functional as F


class Model:
    """A module in training mode, one batch of inputs by name, and its labels.

    `loss` is the loss for `frit.compile`, `loss_of(output, labels)` the same in PyTorch, where `output(module(**inputs))`
    is the tensor that it takes.
    """

    def __init__(self, module, inputs, labels, loss="cross_entropy", output=lambda y: y.logits, images=False):
        self.module, self.inputs, self.labels = module.train(), inputs, labels
        self.loss, self.loss_of, self.output, self.images = loss, LOSSES[loss], output, images


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), labels.reshape(-1))


LOSSES = {"cross_entropy": cross_entropy, "mse": lambda found, labels: F.mse_loss(found.float(), labels)}


def tokens(batch, length, vocabulary):
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def language_model(config_type, module_type, batch, length, **settings):
    config = config_type(use_cache=False, **settings)
    ids = tokens(batch, length + 1, config.vocab_size)
    return Model(module_type(config), {"input_ids": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous())


def gpt2(hf, batch=4, length=256):
    none = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return language_model(hf.GPT2Config, hf.GPT2LMHeadModel, batch, length, **none)


def llama(hf, batch=4, length=256):
    """110 million parameters, 12 heads that share 4 of keys and values."""
    sizes = {"hidden_size": 768, "intermediate_size": 2432, "num_hidden_layers": 12, "num_attention_heads": 12}
    return language_model(
        hf.LlamaConfig, hf.LlamaForCausalLM, batch, length, num_key_value_heads=4, vocab_size=32000, tie_word_embeddings=True, **sizes
    )


def bert(hf, batch=8, length=128):
    config = hf.BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    ids = tokens(batch, length, config.vocab_size)
    mask = (torch.arange(length) < torch.linspace(length // 2, length, batch)[:, None]).long()
    inputs = {"input_ids": ids, "attention_mask": mask}
    return Model(hf.BertForMaskedLM(config), inputs, tokens(batch, length, config.vocab_size))


class Logits(torch.nn.Module):
    """An encoder and decoder that gives its logits only."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids).logits


def t5(hf, batch=8, source=128, target=64):
    sizes = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 32128}
    config = hf.T5Config(dropout_rate=0.0, use_cache=False, **sizes)
    inputs = {"input_ids": tokens(batch, source, 32128), "attention_mask": torch.ones(batch, source, dtype=torch.long)}
    inputs["decoder_input_ids"] = tokens(batch, target, 32128)
    module = Logits(hf.T5ForConditionalGeneration(config))
    return Model(module, inputs, tokens(batch, target, 32128), output=lambda y: y)


def pictures(module, batch, size):
    inputs = {"pixel_values": torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))}
    return Model(module, inputs, tokens(1, batch, 1000)[0], images=True)


def vit(hf, batch=8):
    config = hf.ViTConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=1000)
    return pictures(hf.ViTForImageClassification(config), batch, 224)


def resnet50(hf, batch=8):
    return pictures(hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=1000)), batch, 224)


def unet(hf, batch=4):
    """The network of DDPM for 32 × 32 images, 36 million parameters."""
    import diffusers

    module = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(128, 256, 256, 256),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=256,
        downsample_padding=0,
        dropout=0.0,
    )
    random = torch.Generator().manual_seed(1)
    inputs = {
        "sample": torch.randn(batch, 3, 32, 32, generator=random),
        "timestep": torch.randint(0, 1000, (batch,), generator=random),
    }
    noise = torch.randn(batch, 3, 32, 32, generator=random)
    return Model(module, inputs, noise, "mse", output=lambda y: y.sample, images=True)


def convnext(hf, batch=8):
    """Depthwise convolutions of 7 × 7 taps."""
    return pictures(hf.ConvNextForImageClassification(hf.ConvNextConfig(num_labels=1000)), batch, 224)


def mobilenet(hf, batch=8):
    """MobileNetV2: depthwise convolutions of 3 × 3 taps, batch normalization."""
    config = hf.MobileNetV2Config(num_labels=1000, classifier_dropout_prob=0.0)
    return pictures(hf.MobileNetV2ForImageClassification(config), batch, 224)


def segformer(hf, batch=8):
    """Narrow stages whose attention reads fewer keys than there are queries."""
    none = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "classifier_dropout_prob": 0, "drop_path_rate": 0}
    return pictures(hf.SegformerForImageClassification(hf.SegformerConfig(num_labels=1000, **none)), batch, 224)


def swin(hf, batch=8):
    """Attention in windows, moved between blocks."""
    none = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "drop_path_rate": 0}
    return pictures(hf.SwinForImageClassification(hf.SwinConfig(num_labels=1000, **none)), batch, 224)


def deberta(hf, batch=8, length=128):
    """Four layers of DeBERTa-v3: attention by content and relative position."""
    none = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "pooler_dropout": 0}
    positions = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256}
    config = hf.DebertaV2Config(
        hidden_size=768, num_hidden_layers=4, num_attention_heads=12, intermediate_size=3072, vocab_size=32000, share_att_key=True, **positions, **none
    )
    ids = tokens(batch, length, config.vocab_size)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Model(hf.DebertaV2ForMaskedLM(config), inputs, tokens(batch, length, config.vocab_size))


def whisper(hf, batch=2, length=64):
    """Whisper tiny: convolutions of one axis, attention over 1,500 places."""
    sizes = {"d_model": 384, "encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536}
    config = hf.WhisperConfig(encoder_layers=4, decoder_layers=4, dropout=0.0, use_cache=False, **sizes)
    sound = torch.randn(batch, 80, 3000, generator=torch.Generator().manual_seed(1))
    inputs = {"input_features": sound, "decoder_input_ids": tokens(batch, length, config.vocab_size)}
    return Model(hf.WhisperForConditionalGeneration(config), inputs, tokens(batch, length, config.vocab_size))


def mamba(hf, batch=2, length=64):
    """Four layers of Mamba 130M, whose scan is exported as one operation after the other."""
    return language_model(hf.MambaConfig, hf.MambaForCausalLM, batch, length, num_hidden_layers=4, vocab_size=32000)


class Recurrent(torch.nn.Module):
    def __init__(self, vocabulary=10000, width=512):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.layers = torch.nn.LSTM(width, width, 2, batch_first=True)
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.head(self.layers(self.embedding(ids))[0])


def lstm(_, batch=16, length=64):
    """A language model of two layers of 512 cells."""
    return Model(Recurrent(), {"ids": tokens(batch, length, 10000)}, tokens(batch, length, 10000), output=lambda y: y)


class Table(torch.nn.Module):
    def __init__(self, columns=784, width=1024, classes=10):
        super().__init__()
        layer = lambda inputs: [torch.nn.Linear(inputs, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU()]
        self.layers = torch.nn.Sequential(*layer(columns), *layer(width), torch.nn.Linear(width, classes))

    def forward(self, x):
        return self.layers(x)


def mlp(_, batch=256):
    """Two layers of 1,024 with batch normalization, for rows of a table."""
    x = torch.randn(batch, 784, generator=torch.Generator().manual_seed(1))
    return Model(Table(), {"x": x}, tokens(1, batch, 10)[0], output=lambda y: y)


SEVEN = (gpt2, bert, llama, t5, vit, resnet50, unet)
OTHERS = (convnext, mobilenet, segformer, swin, deberta, whisper, mamba, lstm, mlp)
MODELS = {f.__name__: f for f in SEVEN + OTHERS}


def make(name):
    """The model of this name; always with the same weights and data."""
    import transformers

    torch.manual_seed(0)
    return MODELS[name](transformers)
