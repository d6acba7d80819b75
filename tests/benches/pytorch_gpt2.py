#!/usr/bin/env python3
"""Time PyTorch's training step of GPT-2 124M on the CPU: the baseline of docs/performance.md.

    python pytorch_gpt2.py [--precision fp32|bf16] [--mode eager|compile] [--threads 2] [--batch 4] [--seq 128]

One step is forward, mean cross-entropy, backward, clip_grad_norm 1.0 and AdamW, on random tokens. Two steps warm up;
the median, the fastest and the slowest of the steps after them are printed as one JSON object, with the process's
peak resident memory. Needs torch and transformers.
"""
import argparse, json, os, resource, statistics, time


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16 is autocast over fp32 weights")
    p.add_argument("--mode", choices=["eager", "compile"], default="eager")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--seq", type=int, default=128)
    p.add_argument("--steps", type=int, default=7, help="timed steps, after two of warm-up")
    p.add_argument("--fused", action="store_true", help="the fused AdamW")
    return p.parse_args()


def main():
    a = arguments()
    os.environ["OMP_NUM_THREADS"] = str(a.threads)
    import torch
    import torch.nn.functional as F
    import transformers as hf

    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    config = hf.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    net = hf.GPT2LMHeadModel(config).train()
    forward = torch.compile(net) if a.mode == "compile" else net
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01, fused=a.fused)
    g = torch.Generator().manual_seed(1)
    n_steps = 2 + a.steps
    x = torch.randint(0, config.vocab_size, (n_steps, a.batch, a.seq + 1), generator=g)
    seconds, losses = [], []
    for s in range(n_steps):
        start = time.perf_counter()
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=a.precision == "bf16"):
            logits = forward(x[s, :, :-1]).logits
        loss = F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), x[s, :, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
    timed = seconds[2:]
    print(json.dumps({
        "torch": torch.__version__, "transformers": hf.__version__, **vars(a),
        "step_s_median": round(statistics.median(timed), 3), "step_s_min": round(min(timed), 3),
        "step_s_max": round(max(timed), 3), "first_step_s": round(seconds[0], 3),
        "loss_first": losses[0], "loss_last": losses[-1],
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "load_average": os.getloadavg()[0],
    }))


if __name__ == "__main__":
    main()
