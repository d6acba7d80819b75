//! Descriptions of a device's performance.

use super::kernel::CONVOLUTION;
use frit_ir::DType;
use serde::{Deserialize, Serialize};

/// A GPU, or one core of a CPU.
///
/// Peaks are the vendor's figures without sparsity; efficiencies are the fractions of them that large
/// work sustains, one calibration per type of device (see `docs/simulator.md`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// For reports.
    pub name: String,
    /// Memory, in GiB.
    pub memory_gib: f64,
    /// Peak memory bandwidth, in 10⁹ bytes per second.
    pub memory_gb_per_s: f64,
    /// Peak of matmuls of f16 and bf16, in 10¹² operations per second.
    pub half_tflops: f64,
    /// Peak of matmuls of f32, in 10¹² operations per second.
    pub single_tflops: f64,
    /// Peak of arithmetic outside tensor cores, in 10¹² operations per second.
    pub vector_tflops: f64,
    /// Number of multiprocessors that tiles of a GEMM are spread over; 0 if work is not quantized
    /// into tiles.
    pub multiprocessors: usize,
    /// Fraction of the peak that a large aligned GEMM sustains.
    pub matmul_efficiency: f64,
    /// Fraction of the peak that attention sustains, forward; of a processor, of the peak of f32.
    pub attention_efficiency: f64,
    /// Fraction of the memory bandwidth that a large copy sustains.
    pub memory_efficiency: f64,
    /// Time between the ends of two empty kernels, in microseconds.
    pub launch_us: f64,
    /// What convolutions sustain, if measured; else a fraction of the rate of matmuls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub convolutions: Option<Convolutions>,
    /// Of a processor, fractions of the rate of large GEMMs that narrow ones sustain, if measured: for f32 and for 16-bit operands, by
    /// the least of rows, columns and terms of a sum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub narrow: Option<Narrow>,
}

/// Sustained rates of convolutions and their gradients, in 10¹² operations of direct sums per second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Convolutions {
    /// Of f32, by width: the fewer of the filters of a group and of the elements of its window.
    pub single_tflops: Curve,
    /// Of f32 with 3 × 3 taps, which processors compute in tiles, by width.
    pub tiles_tflops: Curve,
    /// Of f16 and bf16, by width.
    pub half_tflops: Curve,
    /// Of f16 and bf16 whose images lie channels last, by width; as of others, if not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels_last_tflops: Option<Curve>,
    /// Fraction of these rates with strides.
    #[serde(default = "whole")]
    pub strided: f64,
    /// Of one channel per group, by taps; as of others, if not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depthwise_tflops: Option<Curve>,
}

fn whole() -> f64 {
    1.0
}

impl Convolutions {
    /// All curves with their names.
    pub(super) fn curves(&self) -> impl Iterator<Item = (&'static str, &Curve)> {
        let dense = [
            ("single_tflops", &self.single_tflops),
            ("tiles_tflops", &self.tiles_tflops),
            ("half_tflops", &self.half_tflops),
        ];
        let last = self.channels_last_tflops.iter().map(|c| ("channels_last_tflops", c));
        let depthwise = self.depthwise_tflops.iter().map(|c| ("depthwise_tflops", c));
        dense.into_iter().chain(last).chain(depthwise)
    }
}

/// Fractions of the rate of large GEMMs, by the least of rows, columns and terms of a sum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Narrow {
    /// Of f32 operands.
    pub single: Curve,
    /// Of f16 and bf16 operands.
    pub half: Curve,
}

/// A quantity that was measured at some sizes, in ascending order: pairs of a size and its value. In files a number is the same at all sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub struct Curve(pub Vec<(usize, f64)>);

/// A [`Curve`] in a file.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "a number, or a list of pairs of a size and a number")]
enum Written {
    Flat(f64),
    Points(Vec<(usize, f64)>),
}

impl From<Written> for Curve {
    fn from(written: Written) -> Curve {
        match written {
            Written::Flat(value) => Curve::flat(value),
            Written::Points(points) => Curve(points),
        }
    }
}

impl From<Curve> for Written {
    fn from(Curve(points): Curve) -> Written {
        match points[..] {
            [(_, value)] => Written::Flat(value),
            _ => Written::Points(points),
        }
    }
}

impl Curve {
    /// The same at all sizes.
    pub fn flat(value: f64) -> Curve {
        Curve(vec![(1, value)])
    }

    /// The value at a size: between two measured ones interpolated along the logarithm of the size, outside that of the nearest. A curve
    /// without points has none, which [`Cluster::defect`](super::Cluster::defect) refuses.
    pub fn at(&self, size: usize) -> f64 {
        let next = self.0.partition_point(|(at, _)| *at < size);
        let [low, high] = [next.saturating_sub(1), next].map(|i| self.0.get(i).or(self.0.last()));
        match (low, high) {
            (Some((from, a)), Some((to, b))) if from < to => {
                let [from, to, size] = [*from, *to, size].map(|size| (size as f64).ln());
                a + (b - a) * (size - from) / (to - from)
            }
            (Some((_, value)), _) => *value,
            _ => f64::NAN,
        }
    }

    /// Whether there are points, with sizes that ascend and values that are positive.
    pub(super) fn is_valid(&self) -> bool {
        let ascends = self.0.is_sorted_by(|(a, _), (b, _)| a < b);
        ascends
            && !self.0.is_empty()
            && self.0.iter().all(|(size, value)| *size > 0 && value.is_finite() && *value > 0.0)
    }
}

impl Device {
    /// NVIDIA A100 SXM with 80 GB.
    pub fn a100() -> Device {
        Device {
            name: "A100-SXM-80GB".into(),
            memory_gib: 80.0,
            memory_gb_per_s: 2039.0,
            half_tflops: 312.0,
            single_tflops: 19.5,
            vector_tflops: 19.5,
            multiprocessors: 108,
            matmul_efficiency: 0.84,
            attention_efficiency: 0.55,
            memory_efficiency: 0.85,
            launch_us: 2.5,
            convolutions: None,
            narrow: None,
        }
    }

    /// NVIDIA H100 SXM with 80 GB.
    pub fn h100() -> Device {
        Device {
            name: "H100-SXM-80GB".into(),
            memory_gib: 80.0,
            memory_gb_per_s: 3350.0,
            half_tflops: 989.0,
            single_tflops: 67.0,
            vector_tflops: 67.0,
            multiprocessors: 132,
            matmul_efficiency: 0.56,
            attention_efficiency: 0.4,
            memory_efficiency: 0.85,
            launch_us: 2.5,
            convolutions: None,
            narrow: None,
        }
    }

    /// An H100 by itself at 700 W, as GPT-2 124M and 1558M ran on it (`docs/gpu.md`): all their GEMMs, epilogues included, and
    /// attention with heads of 64, forward and backward, by cuDNN's deterministic engines; and as ResNet-50 did: its
    /// convolutions of `[N, C, H, W]` in bf16 and all their gradients, transposes included, and those of 3 × 3 taps of images that
    /// lie channels last. Those of f32 were not measured.
    pub fn h100_alone() -> Device {
        let alone =
            Device { matmul_efficiency: 0.72, attention_efficiency: 0.26, ..Device::h100() };
        let single = Curve::flat(CONVOLUTION * alone.matmul_efficiency * alone.single_tflops);
        let convolutions = Convolutions {
            single_tflops: single.clone(),
            tiles_tflops: single,
            half_tflops: Curve::flat(148.0),
            channels_last_tflops: Some(Curve(vec![(64, 400.0), (128, 640.0), (256, 750.0)])),
            strided: 1.0,
            depthwise_tflops: None,
        };
        Device { convolutions: Some(convolutions), ..alone }
    }

    /// NVIDIA H200 SXM: an H100 with more and faster memory.
    pub fn h200() -> Device {
        Device {
            name: "H200-SXM-141GB".into(),
            memory_gib: 141.0,
            memory_gb_per_s: 4800.0,
            ..Device::h100()
        }
    }

    /// An H200 whose GEMMs run at the rate that large ones reach in isolation: 790 of 989 TFLOP/s
    /// in bf16 at 8192³ (cuBLAS on H100 SXM as published with CUTLASS 3 and with DeepGEMM), without
    /// the lower clocks of long training runs that [`Device::h200`] is calibrated with.
    pub fn h200_gemm() -> Device {
        Device { matmul_efficiency: 0.8, ..Device::h200() }
    }

    /// One core of a CPU, as measured by `gemm_bench` for f32 with AVX-512 and AVX2, and for pairs of bf16 on AMD's processors, which alone
    /// have SSE4a. Intel's multiply these at half the rate of f32, so kernels widen them, unless there is AMX, whose
    /// GEMMs reach six times the rate of those of f32 where the peak is fourteen times that: caches are too slow for more. It
    /// multiplies f32 numbers, too, as sums of bf16 numbers.
    pub fn cpu(features: &str) -> Device {
        let has = |feature: &str| features.split(',').any(|f| f == feature);
        let vectors = if has("+avx512f") { 0.23 } else { 0.115 };
        let has_tiles = has("+amx-bf16") && has("+amx-tile");
        let single_tflops = if has_tiles && has("+avx512f") { 1.4 * vectors } else { vectors };
        let half_tflops = if has_tiles {
            6.0 * vectors
        } else if has("+avx512bf16") && has("+sse4a") {
            0.42
        } else {
            vectors
        };
        Device {
            name: "CPU core".into(),
            memory_gib: 16.0,
            memory_gb_per_s: 25.0,
            half_tflops,
            single_tflops,
            vector_tflops: 0.1,
            multiprocessors: 0,
            matmul_efficiency: 1.0,
            attention_efficiency: 0.5,
            memory_efficiency: 1.0,
            launch_us: 1.0,
            convolutions: None,
            narrow: None,
        }
    }

    /// Whether GEMMs of 16-bit operands run on tensor cores that read whole aligned rows. CPU kernels pack their
    /// operands, so alignment makes no difference there.
    pub fn has_matrix_units(&self) -> bool {
        self.multiprocessors > 0
    }

    /// Peak of matmuls of this type, in operations per second.
    pub fn peak_flops(&self, dtype: DType) -> f64 {
        let tflops = match (dtype.is_low_precision(), dtype.size()) {
            // Twice the rate of 16-bit operands (NVIDIA, H100 data sheet); processors emulate them.
            (true, 1) if self.has_matrix_units() => 2.0 * self.half_tflops,
            (true, _) => self.half_tflops,
            (false, _) => self.single_tflops,
        };
        1e12 * tflops
    }

    /// Sustained bytes per second of memory.
    pub fn bytes_per_second(&self) -> f64 {
        1e9 * self.memory_gb_per_s * self.memory_efficiency
    }
}
