#!/usr/bin/env python3
"""Export tiny, randomly initialised models, most from transformers, with both exporters, with PyTorch's reference numbers.

    python export_transformers.py OUT_DIR [NAME ...] [--exporters dynamo,optimized,torchscript]

For each architecture OUT_DIR/NAME/ receives
    dynamo.onnx, optimized.onnx, torchscript.onnx
                         the forward graph from the dynamo exporter (plain and with its default optimization) and from
                         the TorchScript exporter, weights inside, training mode, no dropout, outputs before the loss
    data.safetensors     one tensor per graph input and the labels, first dimension = examples
    grads.safetensors    fp64 gradients of the first batch by parameter name (unscaled, unclipped)
    reference.json       losses of 20 AdamW steps in fp32, bf16 autocast and fp64
The training setup is that of `frit run` with its default optimizer and schedule. Needs torch, transformers, onnx,
onnxscript and safetensors.
"""
import argparse
import copy
import json
import pathlib
import sys
import traceback
import warnings

import torch
import torch.nn.functional as F
import transformers as hf
from safetensors.torch import save_file
from torch import nn

STEPS, BATCH, SEQ = 20, 8, 16
EXPORTERS = ["dynamo", "optimized", "torchscript"]

SMALL = dict(vocab_size=151, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, use_cache=False)
GATED = dict(SMALL, intermediate_size=48, max_position_embeddings=64)
GROUPED = dict(GATED, num_key_value_heads=2)
ENCODER = dict(SMALL, intermediate_size=48, max_position_embeddings=64, hidden_dropout_prob=0.0,
               attention_probs_dropout_prob=0.0)
PAIR = dict(vocab_size=151, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, dropout=0.0,
            attention_dropout=0.0, activation_dropout=0.0, use_cache=False, pad_token_id=1, bos_token_id=0, eos_token_id=2,
            decoder_start_token_id=2, forced_eos_token_id=None)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
EXPERTS = dict(GROUPED, num_experts_per_tok=2, experts_implementation="batched_mm")


def causal(model, config, **kwargs):
    return lambda: (getattr(hf, model)(getattr(hf, config)(**kwargs)), "causal")


def masked(model, config, **kwargs):
    return lambda: (getattr(hf, model)(getattr(hf, config)(**kwargs)), "masked")


def classes(model, config, **kwargs):
    return lambda: (getattr(hf, model)(getattr(hf, config)(num_labels=4, **kwargs)), "classes")


def pair(model, config, **kwargs):
    return lambda: (getattr(hf, model)(getattr(hf, config)(**kwargs)), "pair")


def image(model, config, **kwargs):
    return lambda: (getattr(hf, model)(getattr(hf, config)(num_labels=4, **kwargs)), "image")


ARCHITECTURES = {
    "opt": causal("OPTForCausalLM", "OPTConfig", vocab_size=151, hidden_size=32, num_hidden_layers=2, ffn_dim=48,
                  num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.0, use_cache=False),
    "bloom": causal("BloomForCausalLM", "BloomConfig", vocab_size=151, hidden_size=32, n_layer=2, n_head=4,
                    hidden_dropout=0.0, attention_dropout=0.0, use_cache=False),
    "gpt_neox": causal("GPTNeoXForCausalLM", "GPTNeoXConfig", **GATED),
    "gptj": causal("GPTJForCausalLM", "GPTJConfig", vocab_size=151, n_positions=64, n_embd=32, n_layer=2, n_head=4,
                   rotary_dim=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False),
    "gpt_neo": causal("GPTNeoForCausalLM", "GPTNeoConfig", vocab_size=151, hidden_size=32, num_layers=2, num_heads=4,
                      attention_types=[[["global", "local"], 1]], window_size=5, max_position_embeddings=64,
                      intermediate_size=48, resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0, use_cache=False),
    "mistral": causal("MistralForCausalLM", "MistralConfig", sliding_window=5, **GROUPED),
    "qwen2": causal("Qwen2ForCausalLM", "Qwen2Config", **GROUPED),
    "qwen3": causal("Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **GROUPED),
    "phi": causal("PhiForCausalLM", "PhiConfig", **GATED),
    "phi3": causal("Phi3ForCausalLM", "Phi3Config", pad_token_id=0, bos_token_id=1, eos_token_id=2, **GROUPED),
    "gemma": causal("GemmaForCausalLM", "GemmaConfig", head_dim=8, **GROUPED),
    "gemma2": causal("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, sliding_window=5, query_pre_attn_scalar=8, **GROUPED),
    "gemma3": causal("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, sliding_window=5, query_pre_attn_scalar=8, **GROUPED),
    "falcon": causal("FalconForCausalLM", "FalconConfig", vocab_size=151, hidden_size=32, num_hidden_layers=2,
                     num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, use_cache=False),
    "stablelm": causal("StableLmForCausalLM", "StableLmConfig", **GROUPED),
    "olmo2": causal("Olmo2ForCausalLM", "Olmo2Config", pad_token_id=None, **GROUPED),
    "cohere": causal("CohereForCausalLM", "CohereConfig", pad_token_id=0, bos_token_id=1, eos_token_id=2, **GROUPED),
    "codegen": causal("CodeGenForCausalLM", "CodeGenConfig", vocab_size=151, n_positions=64, n_embd=32, n_layer=2,
                      n_head=4, rotary_dim=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False),
    "mpt": causal("MptForCausalLM", "MptConfig", vocab_size=151, d_model=32, n_layers=2, n_heads=4, max_seq_len=64,
                  use_cache=False),
    "mixtral": causal("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **EXPERTS),
    "qwen2_moe": causal("Qwen2MoeForCausalLM", "Qwen2MoeConfig", num_experts=4, moe_intermediate_size=24,
                        shared_expert_intermediate_size=24, **EXPERTS),
    "starcoder2": causal("Starcoder2ForCausalLM", "Starcoder2Config", sliding_window=5, **GROUPED),
    "olmo": causal("OlmoForCausalLM", "OlmoConfig", **GROUPED),
    "olmo3": causal("Olmo3ForCausalLM", "Olmo3Config", sliding_window=5, **GROUPED),
    "granite": causal("GraniteForCausalLM", "GraniteConfig", embedding_multiplier=2.0, residual_multiplier=0.5,
                      logits_scaling=1.5, **GROUPED),
    "deepseek_v3": causal("DeepseekV3ForCausalLM", "DeepseekV3Config", q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
                          qk_rope_head_dim=4, v_head_dim=8, first_k_dense_replace=2, moe_intermediate_size=16,
                          pad_token_id=0, bos_token_id=1, eos_token_id=2, **GATED),
    "mamba": causal("MambaForCausalLM", "MambaConfig", vocab_size=151, hidden_size=16, state_size=4, num_hidden_layers=1,
                    use_cache=False, use_mambapy=False),
    "rwkv": causal("RwkvForCausalLM", "RwkvConfig", vocab_size=151, hidden_size=32, attention_hidden_size=32,
                   num_hidden_layers=2, context_length=64, use_cache=False),
    "xlnet": causal("XLNetLMHeadModel", "XLNetConfig", vocab_size=151, d_model=32, n_layer=2, n_head=4, d_inner=48,
                    dropout=0.0),
    "granitemoe": causal("GraniteMoeForCausalLM", "GraniteMoeConfig", num_local_experts=4, **EXPERTS, **TOKENS),
    "glm4": causal("Glm4ForCausalLM", "Glm4Config", head_dim=8, **GROUPED, **TOKENS),
    "exaone4": causal("Exaone4ForCausalLM", "Exaone4Config", sliding_window=5, sliding_window_pattern=2, **GROUPED, **TOKENS),
    "apertus": causal("ApertusForCausalLM", "ApertusConfig", **GROUPED, **TOKENS),
    "nemotron": causal("NemotronForCausalLM", "NemotronConfig", **GROUPED, **TOKENS),
    "persimmon": causal("PersimmonForCausalLM", "PersimmonConfig", **GATED, **TOKENS),
    "diffllama": causal("DiffLlamaForCausalLM", "DiffLlamaConfig", attention_dropout=0.0, **GROUPED, **TOKENS),
    "biogpt": causal("BioGptForCausalLM", "BioGptConfig", activation_dropout=0.0, layerdrop=0.0, **ENCODER),
    "ctrl": causal("CTRLLMHeadModel", "CTRLConfig", vocab_size=151, n_positions=64, n_embd=32, dff=48, n_layer=2, n_head=4,
                   resid_pdrop=0.0, embd_pdrop=0.0, use_cache=False),
    "lfm2": causal("Lfm2ForCausalLM", "Lfm2Config", layer_types=["conv", "full_attention"], **GROUPED, **TOKENS),
    "mamba2": causal("Mamba2ForCausalLM", "Mamba2Config", vocab_size=151, hidden_size=16, state_size=4, num_hidden_layers=1,
                     num_heads=4, head_dim=8, n_groups=1, chunk_size=8, use_cache=False),
    "falcon_mamba": causal("FalconMambaForCausalLM", "FalconMambaConfig", vocab_size=151, hidden_size=16, state_size=4,
                           num_hidden_layers=1, use_cache=False),
    "bamba": causal("BambaForCausalLM", "BambaConfig", mamba_n_heads=4, mamba_d_head=16, mamba_d_state=4, mamba_n_groups=1,
                    mamba_chunk_size=8, attn_layer_indices=[1], **GROUPED, **TOKENS),
    "zamba2": causal("Zamba2ForCausalLM", "Zamba2Config", layers_block_type=["mamba", "hybrid"], num_key_value_heads=4,
                     intermediate_size=48, mamba_d_state=4, n_mamba_heads=4, mamba_ngroups=1, chunk_size=8, **SMALL),
    "qwen3_next": causal("Qwen3NextForCausalLM", "Qwen3NextConfig", num_experts=4, moe_intermediate_size=24,
                         shared_expert_intermediate_size=24, head_dim=8, linear_num_value_heads=4, linear_num_key_heads=2,
                         linear_key_head_dim=8, linear_value_head_dim=8,
                         layer_types=["linear_attention", "full_attention"], **EXPERTS),
    "recurrent_gemma": causal("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", lru_width=32, attention_window_size=8,
                              block_types=["recurrent", "attention"], num_key_value_heads=1, **GATED),
    "fnet": masked("FNetForMaskedLM", "FNetConfig", vocab_size=151, hidden_size=32, num_hidden_layers=2,
                   intermediate_size=48, max_position_embeddings=64, hidden_dropout_prob=0.0),
    "squeezebert": classes("SqueezeBertForSequenceClassification", "SqueezeBertConfig", embedding_size=32, **ENCODER),
    "convbert": classes("ConvBertForSequenceClassification", "ConvBertConfig", embedding_size=32, head_ratio=2,
                        conv_kernel_size=3, num_groups=1, **ENCODER),
    "longt5": pair("LongT5ForConditionalGeneration", "LongT5Config", vocab_size=151, d_model=32, d_kv=8, d_ff=48,
                   num_layers=2, num_heads=4, dropout_rate=0.0, local_radius=4, use_cache=False, decoder_start_token_id=0),
    "poolformer": image("PoolFormerForImageClassification", "PoolFormerConfig", depths=[1, 1], hidden_sizes=[8, 16],
                        patch_sizes=[3, 3], strides=[2, 2], padding=[1, 1], num_encoder_blocks=2, drop_path_rate=0.0,
                        image_size=16),
    "focalnet": image("FocalNetForImageClassification", "FocalNetConfig", image_size=32, embed_dim=16, depths=[1, 1],
                      focal_levels=[2, 2], focal_windows=[3, 3], hidden_sizes=[16, 32], drop_path_rate=0.0),
    "distilbert": classes("DistilBertForSequenceClassification", "DistilBertConfig", vocab_size=151, dim=32, n_layers=2,
                          n_heads=4, hidden_dim=48, max_position_embeddings=64, dropout=0.0, attention_dropout=0.0,
                          seq_classif_dropout=0.0),
    "roberta": masked("RobertaForMaskedLM", "RobertaConfig", **ENCODER),
    "electra": classes("ElectraForSequenceClassification", "ElectraConfig", embedding_size=16, **ENCODER),
    "albert": masked("AlbertForMaskedLM", "AlbertConfig", embedding_size=16, **ENCODER),
    "deberta": masked("DebertaV2ForMaskedLM", "DebertaV2Config", relative_attention=True, pos_att_type=["c2p", "p2c"],
                      position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True, type_vocab_size=0, **ENCODER),
    "mpnet": masked("MPNetForMaskedLM", "MPNetConfig", **ENCODER),
    "modernbert": masked("ModernBertForMaskedLM", "ModernBertConfig", pad_token_id=0, global_attn_every_n_layers=2,
                         local_attention=6, **GATED),
    "xlm_roberta": masked("XLMRobertaForMaskedLM", "XLMRobertaConfig", **ENCODER),
    "funnel": classes("FunnelForSequenceClassification", "FunnelConfig", vocab_size=151, block_sizes=[1, 1], d_model=32,
                      num_decoder_layers=1, n_head=4, d_head=8, d_inner=48, hidden_dropout=0.0, attention_dropout=0.0,
                      activation_dropout=0.0),
    "roformer": masked("RoFormerForMaskedLM", "RoFormerConfig", embedding_size=16, rotary_value=True, **ENCODER),
    "mbart": pair("MBartForConditionalGeneration", "MBartConfig", **PAIR),
    "m2m_100": pair("M2M100ForConditionalGeneration", "M2M100Config", **PAIR),
    "blenderbot": pair("BlenderbotForConditionalGeneration", "BlenderbotConfig", **PAIR),
    "plbart": pair("PLBartForConditionalGeneration", "PLBartConfig", **PAIR),
    "bart": pair("BartForConditionalGeneration", "BartConfig", **PAIR),
    "pegasus": pair("PegasusForConditionalGeneration", "PegasusConfig", **PAIR),
    "marian": pair("MarianMTModel", "MarianConfig", decoder_vocab_size=151, **PAIR),
    "mt5": pair("MT5ForConditionalGeneration", "MT5Config", vocab_size=151, d_model=32, d_kv=8, d_ff=48, num_layers=2,
                num_heads=4, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0),
    "vit": image("ViTForImageClassification", "ViTConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                 intermediate_size=48, image_size=16, patch_size=4, hidden_dropout_prob=0.0,
                 attention_probs_dropout_prob=0.0),
    "swin": image("SwinForImageClassification", "SwinConfig", image_size=32, patch_size=4, embed_dim=16, depths=[2, 2],
                  num_heads=[2, 4], window_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                  drop_path_rate=0.0),
    "deit": image("DeiTForImageClassification", "DeiTConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                  intermediate_size=48, image_size=16, patch_size=4, hidden_dropout_prob=0.0,
                  attention_probs_dropout_prob=0.0),
}


class Output:
    """What a transformers model returns, as far as it is used."""

    def __init__(self, logits):
        self.logits = logits


class Recurrent(nn.Module):
    """A language model of torch.nn's recurrent layers."""

    def __init__(self, kind, bidirectional):
        super().__init__()
        self.emb = nn.Embedding(151, 16)
        self.rnn = getattr(nn, kind)(16, 12, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(24 if bidirectional else 12, 151)

    def forward(self, input_ids):
        return Output(self.head(self.rnn(self.emb(input_ids))[0]))


class Experts(nn.Module):
    """A mixture of experts: every expert by einsum, or each token sent to a slot of its two experts and back."""

    def __init__(self, dispatch, experts=4, width=32, hidden=48):
        super().__init__()
        self.dispatch, self.experts = dispatch, experts
        self.emb, self.gate = nn.Embedding(151, width), nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.1)
        self.head = nn.Linear(width, 151)

    def forward(self, input_ids):
        x = self.emb(input_ids)
        tokens = x.reshape(-1, x.shape[-1])
        chance = F.softmax(self.gate(tokens), -1)
        weight, chosen = torch.topk(chance, 2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        y = self.send(tokens, weight, chosen) if self.dispatch else self.all(tokens, chance, weight, chosen)
        return Output(self.head((tokens + y).reshape(x.shape)))

    def all(self, tokens, chance, weight, chosen):
        dense = torch.zeros_like(chance).scatter(1, chosen, weight)
        hidden = F.silu(torch.einsum("tc,ech->teh", tokens, self.up))
        return torch.einsum("tec,te->tc", torch.einsum("teh,ehc->tec", hidden, self.down), dense)

    def send(self, tokens, weight, chosen):
        n, expert = tokens.shape[0], chosen.reshape(-1)
        order = torch.cumsum(F.one_hot(expert, self.experts), 0) - 1
        slot = expert * n + order.gather(1, expert[:, None]).squeeze(1)
        source = torch.arange(n).repeat_interleave(2)
        slots = torch.zeros(self.experts * n, tokens.shape[1], dtype=tokens.dtype).index_add(0, slot, tokens[source])
        out = torch.bmm(F.silu(torch.bmm(slots.view(self.experts, n, -1), self.up)), self.down).view(self.experts * n, -1)
        parts = (out[slot] * weight.reshape(-1, 1)).to(tokens.dtype)
        return torch.zeros_like(tokens).index_add(0, source, parts)


ARCHITECTURES.update({
    "lstm": lambda: (Recurrent("LSTM", True), "causal"),
    "gru": lambda: (Recurrent("GRU", False), "causal"),
    "moe_einsum": lambda: (Experts(dispatch=False), "causal"),
    "moe_dispatch": lambda: (Experts(dispatch=True), "causal"),
})


class Logits(nn.Module):
    """Positional inputs in, the logits out, around a transformers model."""

    def __init__(self, net, names):
        super().__init__()
        self.net, self.names = net, names

    def forward(self, *args):
        return self.net(**dict(zip(self.names, args))).logits


def examples(kind, generator):
    """Inputs by name and labels of all steps."""
    n = BATCH * STEPS
    tokens = lambda t: torch.randint(0, 151, (n, t), generator=generator)
    mask = lambda t: (torch.arange(t)[None] < torch.randint(t // 2, t + 1, (n, 1), generator=generator)).long()
    if kind == "causal":
        x = tokens(SEQ + 1)
        return {"input_ids": x[:, :-1].contiguous()}, x[:, 1:].contiguous()
    if kind == "masked":
        kept = mask(SEQ)
        return {"input_ids": tokens(SEQ), "attention_mask": kept}, torch.where(kept == 1, tokens(SEQ), -100)
    if kind == "classes":
        return {"input_ids": tokens(SEQ), "attention_mask": mask(SEQ)}, torch.randint(0, 4, (n,), generator=generator)
    if kind == "pair":
        target = tokens(SEQ - 3)
        inputs = {"input_ids": tokens(SEQ), "decoder_input_ids": target[:, :-1].contiguous()}
        return inputs, target[:, 1:].contiguous()
    size = 32 if kind == "image32" else 16
    return {"pixel_values": torch.randn(n, 3, size, size, generator=generator)}, torch.randint(0, 4, (n,), generator=generator)


def train(net, inputs, labels, mode):
    net = copy.deepcopy(net)
    if mode == "fp64":
        net = net.double()
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    losses, first = [], None
    for step in range(STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "bf16"):
            out = net(*[v[part] for v in inputs.values()])
            out = out if out.dtype == torch.float64 else out.float()
            loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), labels[part].reshape(-1))
        loss.backward()
        if step == 0:
            first = {n: p.grad.float().clone() for n, p in net.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, first


def export(net, inputs, path, exporter):
    args = tuple(v[:BATCH] for v in inputs.values())
    common = dict(input_names=list(inputs), output_names=["logits"])
    if exporter == "torchscript":
        torch.onnx.export(net, args, path, dynamo=False, opset_version=17, do_constant_folding=False,
                          training=torch.onnx.TrainingMode.PRESERVE,
                          dynamic_axes={k: {0: "batch"} for k in [*inputs, "logits"]}, **common)
    else:
        torch.onnx.export(net, args, path, dynamo=True, external_data=False, optimize=exporter == "optimized",
                          dynamic_shapes={"args": tuple({0: torch.export.Dim("batch")} for _ in inputs)}, **common)


def one(out, name, exporters):
    torch.manual_seed(0)
    net, kind = ARCHITECTURES[name]()
    if kind == "image" and net.config.image_size == 32:
        kind = "image32"
    inputs, labels = examples(kind, torch.Generator().manual_seed(1))
    net = Logits(net, list(inputs)).train()
    folder = pathlib.Path(out) / name
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**inputs, "labels": labels}, folder / "data.safetensors")
    reference = {"loss": "cross_entropy", "global_batch": BATCH, "steps": STEPS, "exports": []}
    for mode in ("fp32", "bf16", "fp64"):
        losses, first = train(net, inputs, labels, mode)
        reference[mode] = {"loss": losses}
    save_file({k: v.contiguous() for k, v in first.items()}, folder / "grads.safetensors")
    for exporter in exporters:
        try:
            export(net, inputs, folder / f"{exporter}.onnx", exporter)
            reference["exports"].append(exporter)
        except Exception as error:
            print(name, exporter, "does not export:", str(error).strip().splitlines()[0][:200], flush=True)
    (folder / "reference.json").write_text(json.dumps(reference, indent=1))
    print(name, "parameters", sum(p.numel() for p in net.parameters()), "exports", reference["exports"], flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--exporters", default=",".join(EXPORTERS))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in args.names or ARCHITECTURES:
        try:
            one(args.out, name, args.exporters.split(","))
        except Exception:
            print(name, "failed", file=sys.stderr)
            traceback.print_exc(limit=2)


if __name__ == "__main__":
    main()
