//! Descriptions of clusters: devices and the network between them.

use super::Device;
use frit_ir::plan::Target;
use serde::{Deserialize, Serialize};

/// One level of the network.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Sustained bus bandwidth of one device, in 10⁹ bytes per second, as nccl-tests reports it. Between
    /// nodes: the node's network bandwidth divided by its devices.
    pub gb_per_s: f64,
    /// Time from one device to the next, in microseconds.
    pub hop_us: f64,
}

/// Nodes of equal devices. Ranks fill one node after the other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// For reports.
    pub name: String,
    /// Devices per node.
    pub devices_per_node: usize,
    /// The device.
    pub device: Device,
    /// Between devices of a node.
    pub intra: Link,
    /// Between nodes.
    pub inter: Link,
    /// Sustained bandwidth between one device and pinned memory of its host, in each direction, in 10⁹ bytes per
    /// second.
    #[serde(default = "pcie_4")]
    pub host_gb_per_s: f64,
    /// Time that a collective takes whatever it moves, in microseconds.
    pub collective_us: f64,
    /// Fraction of the compute rate that a running collective takes away.
    pub contention: f64,
    /// Memory that the device's context and the libraries hold outside the plan's arenas, in GiB.
    pub reserved_gib: f64,
}

/// Sustained bandwidth of sixteen lanes of PCIe 4.0, of 32 · 10⁹ bytes per second in each direction.
fn pcie_4() -> f64 {
    25.0
}

/// Names of the built-in clusters.
pub const NAMES: &[&str] = &["a100-80g", "h100", "h100-alone", "h200", "h200-gemm"];

impl Cluster {
    /// A built-in cluster.
    ///
    /// `a100-80g`: nodes of 8 A100 SXM with 400 Gb/s per node (AWS p4de). `h100`, `h100-alone`, `h200`, `h200-gemm`: nodes of 8
    /// with NVSwitch and 400 Gb/s per GPU. Bandwidths and latencies are nccl-tests results and the
    /// calibration published with AutoParallel (see `docs/simulator.md`).
    pub fn named(name: &str) -> Option<Cluster> {
        let hopper = |device| Cluster {
            name: name.into(),
            devices_per_node: 8,
            device,
            intra: Link { gb_per_s: 340.0, hop_us: 2.5 },
            inter: Link { gb_per_s: 42.0, hop_us: 5.0 },
            host_gb_per_s: 50.0,
            collective_us: 60.0,
            contention: 0.06,
            reserved_gib: 2.5,
        };
        match name {
            "a100-80g" => Some(Cluster {
                name: name.into(),
                devices_per_node: 8,
                device: Device::a100(),
                intra: Link { gb_per_s: 230.0, hop_us: 3.0 },
                inter: Link { gb_per_s: 5.5, hop_us: 10.0 },
                host_gb_per_s: pcie_4(),
                collective_us: 60.0,
                contention: 0.06,
                reserved_gib: 2.0,
            }),
            "h100" => Some(hopper(Device::h100())),
            "h100-alone" => Some(hopper(Device::h100_alone())),
            "h200" => Some(hopper(Device::h200())),
            "h200-gemm" => Some(hopper(Device::h200_gemm())),
            _ => None,
        }
    }

    /// Threads of one process on a CPU with these features.
    pub fn threads(features: &str) -> Cluster {
        let link = Link { gb_per_s: 10.0, hop_us: 1.0 };
        Cluster {
            name: "threads".into(),
            devices_per_node: usize::MAX,
            device: Device::cpu(features),
            intra: link,
            inter: link,
            host_gb_per_s: 12.5,
            collective_us: 1.0,
            contention: 0.0,
            reserved_gib: 0.0,
        }
    }

    /// The cluster that a plan is scheduled for.
    pub fn of(target: &Target) -> Cluster {
        let gpu = match target.arch.as_str() {
            "sm_80" => Cluster::named("a100-80g"),
            arch if arch.starts_with("sm_") => Cluster::named("h100"),
            _ => None,
        };
        gpu.unwrap_or_else(|| Cluster::threads(&target.features))
    }

    /// Seconds of a copy between a device and its host.
    pub fn host_copy_seconds(&self, bytes: u64) -> f64 {
        1e-6 * self.device.launch_us + bytes as f64 / (1e9 * self.host_gb_per_s)
    }

    /// Bytes of a device that plans may use.
    pub fn free_bytes(&self) -> u64 {
        let gib = (self.device.memory_gib - self.reserved_gib).max(0.0);
        (gib * (1_u64 << 30) as f64) as u64
    }

    /// The first invalid field and its constraint, if any.
    pub fn defect(&self) -> Option<String> {
        let d = &self.device;
        let positive = [
            ("device.memory_gib", d.memory_gib),
            ("device.memory_gb_per_s", d.memory_gb_per_s),
            ("device.half_tflops", d.half_tflops),
            ("device.single_tflops", d.single_tflops),
            ("device.vector_tflops", d.vector_tflops),
            ("intra.gb_per_s", self.intra.gb_per_s),
            ("inter.gb_per_s", self.inter.gb_per_s),
            ("host_gb_per_s", self.host_gb_per_s),
        ];
        let fraction = [
            ("device.matmul_efficiency", d.matmul_efficiency),
            ("device.attention_efficiency", d.attention_efficiency),
            ("device.memory_efficiency", d.memory_efficiency),
            ("contention", self.contention),
        ];
        let time = [
            ("device.launch_us", d.launch_us),
            ("intra.hop_us", self.intra.hop_us),
            ("inter.hop_us", self.inter.hop_us),
            ("collective_us", self.collective_us),
            ("reserved_gib", self.reserved_gib),
        ];
        if self.devices_per_node == 0 {
            return Some("`devices_per_node` must be at least 1".into());
        }
        for (name, x) in positive {
            if !(x.is_finite() && x > 0.0) {
                return Some(format!("`{name}` must be positive, not {x}"));
            }
        }
        let strided = d.convolutions.as_ref().map_or(1.0, |c| c.strided);
        let fraction = fraction.into_iter().chain([("device.convolutions.strided", strided)]);
        for (name, x) in fraction {
            let least = if name == "contention" { 0.0 } else { f64::MIN_POSITIVE };
            let most = if name == "contention" { 0.99 } else { 1.0 };
            if !(least..=most).contains(&x) {
                return Some(format!("`{name}` must be a fraction, not {x}"));
            }
        }
        let convolutions = d.convolutions.iter().flat_map(|c| c.curves());
        let narrow = d.narrow.iter().flat_map(|n| [("single", &n.single), ("half", &n.half)]);
        let curves = convolutions.map(|(name, curve)| (format!("convolutions.{name}"), curve));
        let curves = curves.chain(narrow.map(|(name, curve)| (format!("narrow.{name}"), curve)));
        for (name, curve) in curves {
            if !curve.is_valid() {
                return Some(format!(
                    "`device.{name}` must have pairs of a size and a value, with sizes that ascend and values that are positive"
                ));
            }
        }
        for (name, x) in time {
            if !(x.is_finite() && x >= 0.0) {
                return Some(format!("`{name}` must not be negative, not {x}"));
            }
        }
        None
    }
}
