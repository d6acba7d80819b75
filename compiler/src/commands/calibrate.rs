//! `frit calibrate`: measures this machine, and describes it for predictions.

use crate::diagnostics::Report;
use frit_ir::{Code, Diagnostic};
use frit_passes::cost::{Cluster, Convolutions, Curve, Device, Narrow};
use frit_runtime::calibrate::{Ceilings, STRIDED_CHANNELS, ceilings};
use frit_runtime::files;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

/// The part of the best rates that matmuls and convolutions sustain in a step: memory is shared with what runs before and behind them, and
/// processors clock lower. As measured of the seven models of `docs/performance.md`.
const SUSTAINED: f64 = 0.92;

/// Arguments of `frit calibrate`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit calibrate                      # what this machine reaches, in about ten seconds
  frit calibrate -o cpu.toml && frit simulate plan --cluster cpu.toml
  frit calibrate --threads 1          # of one thread, as each rank has when two ranks share two processors
  frit calibrate --json | jq .gemm_f32_flops

Rates are the best of several calls: what else runs at the same time lowers them.")]
pub struct Args {
    /// Threads of a rank; all processors by default.
    #[arg(long)]
    pub threads: Option<NonZeroUsize>,
    /// Write a cluster of this machine to this TOML file, for `--cluster` and `target.cluster`.
    #[arg(short, long, value_name = "FILE.toml")]
    pub output: Option<PathBuf>,
    /// As JSON, with stable keys.
    #[arg(long)]
    pub json: bool,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let processors = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let found = ceilings(args.threads.map_or_else(processors, NonZeroUsize::get));
    if let Some(path) = &args.output {
        write(path, &cluster(&found))?;
    }
    if args.json {
        return Ok(format!("{:#}\n", serde_json::to_value(&found).unwrap_or_default()));
    }
    Ok(text(&found, args.output.as_deref()))
}

fn write(path: &Path, cluster: &Cluster) -> Result<(), Report> {
    let text = toml::to_string(cluster).unwrap_or_default();
    files::deliver(path, |out| out.write_all(text.as_bytes())).map_err(|e| {
        Diagnostic::error(Code::FileUnwritable, format!("cannot write {}: {e}", path.display()))
            .into()
    })
}

/// Ranks that are threads of one process on this machine.
fn cluster(found: &Ceilings) -> Cluster {
    let base = Cluster::threads("");
    // One efficiency serves both types, so the 16-bit peak is the one with which it gives the measured GEMM rate.
    let efficiency = (found.gemm_f32_flops / found.f32_flops).min(1.0);
    let unstrided = curve(&found.conv_bf16_flops, 1.0).at(STRIDED_CHANNELS);
    let device = Device {
        name: format!("CPU, {} threads", found.threads),
        memory_gib: found
            .memory_bytes
            .map_or(base.device.memory_gib, |b| b as f64 / (1_u64 << 30) as f64),
        memory_gb_per_s: found.bytes_per_second / 1e9,
        half_tflops: found.gemm_bf16_flops / efficiency / 1e12,
        single_tflops: found.f32_flops / 1e12,
        // Generated code multiplies and adds separately.
        vector_tflops: found.multiply_add_flops / 2e12,
        matmul_efficiency: SUSTAINED * efficiency,
        attention_efficiency: (found.attention_flops / found.f32_flops).min(1.0),
        launch_us: 1e6 * found.call_seconds,
        convolutions: Some(Convolutions {
            single_tflops: curve(&found.conv_f32_flops, SUSTAINED / 1e12),
            tiles_tflops: curve(&found.conv_3x3_f32_flops, SUSTAINED / 1e12),
            half_tflops: curve(&found.conv_bf16_flops, SUSTAINED / 1e12),
            channels_last_tflops: None,
            strided: (found.conv_strided_bf16_flops / unstrided).min(1.0),
            depthwise_tflops: Some(curve(&found.conv_depthwise_f32_flops, SUSTAINED / 1e12)),
        }),
        narrow: Some(Narrow {
            single: curve(&found.narrow_f32_flops, 1.0 / found.gemm_f32_flops),
            half: curve(&found.narrow_bf16_flops, 1.0 / found.gemm_bf16_flops),
        }),
        ..base.device
    };
    Cluster { name: "cpu".into(), devices_per_node: 64, device, ..base }
}

/// What was measured at some sizes, times a factor.
fn curve(measured: &[(usize, f64)], factor: f64) -> Curve {
    Curve(measured.iter().map(|(size, value)| (*size, factor * value)).collect())
}

fn text(found: &Ceilings, output: Option<&Path>) -> String {
    let giga = |flops: f64| format!("{:.0} GFLOP/s", flops / 1e9);
    let range = |curve: &[(usize, f64)]| {
        let ends = [curve.first(), curve.last()].map(|end| end.map_or(0.0, |end| end.1 / 1e9));
        format!("{:.0} ... {:.0} GFLOP/s", ends[0], ends[1])
    };
    let part = |flops: f64, of: f64| format!("{} ({:.0} %)", giga(flops), 100.0 * flops / of);
    let mut text = format!(
        "threads       {}\n\
         peak          {} in f32, {} in bf16: multiply-adds in registers{}\n\
         GEMM          {} in f32, {} in bf16: of 2048 rows, from 768 to 3072 columns, with gradients\n\
         \x20 narrow      {} in f32, {} in bf16: of 6272 rows, from 16 ... 768 columns to four times as many\n\
         convolutions  {} in f32, {} with 3 x 3 taps, {} in bf16: of 16 ... 512 channels, with gradients\n\
         \x20 strided     {} in bf16: 3 x 3 taps, 128 channels\n\
         \x20 depthwise   {} in f32: 3 x 3, 5 x 5 and 7 x 7 taps\n\
         attention     {} in f32: causal, 12 heads, 1024 tokens\n\
         memory        {:.1} GB/s read and written\n\
         empty kernel  {:.2} us\n",
        found.threads,
        giga(found.f32_flops),
        giga(found.bf16_flops),
        if found.f32_flops > found.multiply_add_flops {
            format!("; {} of f32 by vectors", giga(found.multiply_add_flops))
        } else {
            String::new()
        },
        part(found.gemm_f32_flops, found.f32_flops),
        part(found.gemm_bf16_flops, found.bf16_flops),
        range(&found.narrow_f32_flops),
        range(&found.narrow_bf16_flops),
        range(&found.conv_f32_flops),
        range(&found.conv_3x3_f32_flops),
        range(&found.conv_bf16_flops),
        giga(found.conv_strided_bf16_flops),
        range(&found.conv_depthwise_f32_flops),
        part(found.attention_flops, found.multiply_add_flops),
        found.bytes_per_second / 1e9,
        1e6 * found.call_seconds,
    );
    if let Some(path) = output {
        text += &format!("cluster       {}\n", path.display());
    }
    text
}
