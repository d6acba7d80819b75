//! Compilation targets: which bodies have a kernel, and code generation.

use crate::config::Config;
use frit_codegen::{CodegenError, HostTarget};
use frit_ir::ops::FusionKind;
use frit_ir::plan::{
    Action, DeviceType, Entry, KernelId, KernelKind, ObjectFile, Plan, Target, layout, sha256_hex,
};
use frit_ir::{Code, Diagnostic, Graph, Op, Origin};
use std::collections::BTreeMap;

/// A processor that plans are compiled for.
#[derive(Clone, Debug)]
pub enum Backend {
    /// A CPU.
    Cpu(HostTarget),
    /// NVIDIA GPUs of an architecture such as `sm_90`, and later ones.
    Cuda {
        /// The architecture.
        arch: String,
        /// How hand-written kernels and libraries are selected.
        selection: frit_select::Options,
    },
}

/// The oldest supported architecture; its code runs on every later GPU.
const OLDEST_GPU: &str = "sm_80";
/// The architectures that `target.arch` may name.
const GPUS: [&str; 7] = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"];

impl Backend {
    /// The processor that a configuration names. `native` is this machine's CPU, and for CUDA, which is
    /// compiled for where no GPU is, the oldest supported architecture.
    ///
    /// # Errors
    /// An unknown `target.arch`.
    pub fn of(config: &Config) -> Result<Backend, Diagnostic> {
        let arch = config.target.arch.as_str();
        let refuse = |what: &str, known: String| {
            let message = format!("unknown {what} `target.arch = {arch}`");
            Err(Diagnostic::error(Code::ArchUnknown, message).help(format!("use {known}")))
        };
        let gpu = |arch: &str| {
            let selection = frit_select::Options { deterministic: config.run.deterministic };
            Ok(Backend::Cuda { arch: arch.into(), selection })
        };
        match (config.target.device, arch) {
            (DeviceType::Cpu, "native") => Ok(Backend::Cpu(HostTarget::native())),
            (DeviceType::Cpu, "x86-64-v3") => {
                Ok(Backend::Cpu(HostTarget::new("x86-64-v3", "+avx2,+fma,+f16c")))
            }
            (DeviceType::Cpu, _) => refuse("CPU", "\"native\" or \"x86-64-v3\"".into()),
            (DeviceType::Cuda, "native") => gpu(OLDEST_GPU),
            (DeviceType::Cuda, arch) if GPUS.contains(&arch) => gpu(arch),
            (DeviceType::Cuda, _) => {
                refuse("GPU", format!("\"native\" or one of {}", GPUS.join(", ")))
            }
        }
    }

    /// Checks that the target has tensor cores for 8-bit floats.
    ///
    /// # Errors
    /// For GPUs that have no matrix units for them.
    pub fn multiplies_fp8(&self) -> Result<(), Diagnostic> {
        let Backend::Cuda { arch, .. } = self else { return Ok(()) };
        if !matches!(arch.as_str(), "sm_80" | "sm_86") {
            return Ok(());
        }
        let message =
            format!("{arch} has no tensor cores for 8-bit floats; sm_89 or later is required");
        Err(Diagnostic::error(Code::NeedsAnotherSetting, message).help(
            "set target.arch = \"sm_89\" or \"sm_90\", or precision.compute = \"bf16\"; on a CPU, fp8 is emulated",
        ))
    }

    /// How the plan names it.
    pub fn describe(&self) -> Target {
        match self {
            Backend::Cpu(host) => Target {
                device: DeviceType::Cpu,
                arch: host.cpu.clone(),
                features: host.features.clone(),
            },
            Backend::Cuda { arch, .. } => {
                Target { device: DeviceType::Cuda, arch: arch.clone(), features: String::new() }
            }
        }
    }

    /// Whether code generation compiles a region.
    pub fn generates(&self) -> fn(&Graph, FusionKind) -> bool {
        match self {
            Backend::Cpu(_) => |body, kind| frit_codegen::supported(body, kind).is_ok(),
            Backend::Cuda { .. } => {
                |body, kind| frit_codegen::supported_on_cuda(body, kind).is_ok()
            }
        }
    }

    /// Whether a region may be formed: there is a kernel for it that is no slower than those of its parts.
    pub fn fuses(&self) -> fn(&Graph, FusionKind) -> bool {
        match self {
            Backend::Cpu(_) => |body, kind| match kind.is_library() {
                true => frit_select::cpu(body).is_some(),
                false => frit_codegen::supported(body, kind).is_ok(),
            },
            Backend::Cuda { .. } => |body, kind| match kind.is_library() {
                true => has_launches(body),
                false => generates_on_cuda(body, kind),
            },
        }
    }

    /// Whether a hand-written kernel executes a body.
    pub fn has_library_kernel(&self) -> fn(&Graph) -> bool {
        match self {
            Backend::Cpu(_) => |body| frit_select::cpu(body).is_some(),
            Backend::Cuda { .. } => |body| has_launches(body),
        }
    }

    /// Compiles the plan's regions into one file, which is empty if no code is wanted. Returns the file's bytes.
    ///
    /// # Errors
    /// A kernel that cannot be compiled; for CUDA, operations that have no kernel there.
    pub fn generate(
        &self,
        plan: &mut Plan,
        regions: &[(KernelId, FusionKind)],
        without_code: bool,
    ) -> Result<Vec<u8>, Diagnostic> {
        if let Backend::Cuda { .. } = self {
            every_kernel_has_code(plan)?;
        }
        if regions.is_empty() {
            return Ok(vec![]);
        }
        let refuse = |e: CodegenError| {
            Diagnostic::error(Code::CodeGeneration, format!("cannot compile the kernels: {e}"))
        };
        let symbols: Vec<String> = regions.iter().map(|(k, _)| plan.kernels[*k].symbol()).collect();
        let sources: Vec<_> = regions
            .iter()
            .zip(&symbols)
            .map(|((k, kind), symbol)| (symbol.as_str(), &plan.kernels[*k].body, *kind))
            .collect();
        let bytes = match self {
            _ if without_code => Ok(vec![]),
            Backend::Cpu(host) => frit_codegen::compile_host(&sources, host).map(|o| o.so_bytes),
            Backend::Cuda { arch, .. } => {
                frit_codegen::compile_cuda(&sources, arch).map(|m| m.ptx.into_bytes())
            }
        };
        let bytes = bytes.map_err(refuse)?;
        let file = layout::kernels(plan.target.device);
        plan.object = Some(ObjectFile { file, sha256: sha256_hex(&bytes) });
        Ok(bytes)
    }

    /// How a body is executed, of this kind and, if it is generated, compiled as `region`; its symbols have what a launch
    /// adds to the kernel's. And the bodies of the generated kernels that it launches, see [`frit_select::Selected`].
    pub fn entry(
        &self,
        body: &Graph,
        kind: KernelKind,
        region: FusionKind,
    ) -> (Entry, Vec<(Graph, FusionKind)>) {
        let entry = match (kind, self) {
            (KernelKind::Generated, Backend::Cpu(_)) => {
                let known = frit_codegen::region_metadata("", body, region).ok();
                known.map(|k| Entry::Host {
                    symbol: k.symbol,
                    extent: k.parallel_extent,
                    grain: k.grain,
                })
            }
            (KernelKind::Generated, Backend::Cuda { .. }) => {
                let known = frit_codegen::cuda_metadata("", body, region).ok();
                known.map(|k| Entry::Cuda { launches: k.launches, scratch_bytes: k.scratch_bytes })
            }
            (KernelKind::Library, Backend::Cpu(_)) => frit_select::cpu(body).map(Entry::Routine),
            (KernelKind::Library, Backend::Cuda { selection, .. }) => {
                if let Some(selected) = frit_select::cuda(body, *selection) {
                    return (Entry::Launches(selected.entry), selected.generated);
                }
                None
            }
            (KernelKind::Interpreted, _) => None,
        };
        (entry.unwrap_or(Entry::Interpreter), vec![])
    }
}

/// Warnings of what the IR interpreter executes: it is slow, and one body is worth one warning.
pub fn interpreted(plan: &Plan) -> Vec<Diagnostic> {
    let mut by_kernel: BTreeMap<KernelId, (usize, &Origin)> = BTreeMap::new();
    for task in &plan.tasks {
        let Action::Kernel { kernel, .. } = &task.action else { continue };
        if plan.kernels[*kernel].kind() == KernelKind::Interpreted {
            by_kernel.entry(*kernel).or_insert((0, &task.origin)).0 += 1;
        }
    }
    let warning = |(kernel, (n, origin)): (KernelId, (usize, &Origin))| {
        let what = operations(&plan.kernels[kernel].body);
        let message = format!("the IR interpreter executes `{what}` ({n} tasks)");
        let help = "it has no CPU routine and no generated code; report the model";
        Diagnostic::warning(Code::Interpreted, message).at(origin).help(help)
    };
    by_kernel.into_iter().map(warning).collect()
}

/// Refuses a plan with bodies that only the IR interpreter executes, which a GPU has not.
fn every_kernel_has_code(plan: &Plan) -> Result<(), Diagnostic> {
    let mut lacking: Vec<(String, &Origin)> = Vec::new();
    for task in &plan.tasks {
        let Action::Kernel { kernel, .. } = &task.action else { continue };
        let kernel = &plan.kernels[*kernel];
        if kernel.kind() == KernelKind::Interpreted {
            lacking.push((operations(&kernel.body), &task.origin));
        }
    }
    let Some((_, first)) = lacking.first() else { return Ok(()) };
    let origin = (*first).clone();
    let mut names: Vec<String> = lacking.iter().map(|(name, _)| format!("`{name}`")).collect();
    names.sort();
    names.dedup();
    let n = lacking.len();
    let message = format!("no CUDA kernel for {} ({n} tasks)", names.join(", "));
    Err(Diagnostic::error(Code::NoCudaKernel, message)
        .at(&origin)
        .help("compile with target.device = \"cpu\", or report the model"))
}

/// The operations of a body with their operands' types.
fn operations(body: &Graph) -> String {
    let list: Vec<String> = body
        .nodes()
        .filter(|(_, n)| !matches!(n.op, Op::Input(_) | Op::Constant(_)))
        .map(|(_, n)| {
            let types: Vec<String> = n.inputs.iter().map(|v| body.ty(*v).to_string()).collect();
            format!("{}({})", n.op.name(), types.join(", "))
        })
        .collect();
    list.join(", ")
}

/// Whether a body has launches, whatever they may be selected from, and code generation compiles what they launch.
fn has_launches(body: &Graph) -> bool {
    frit_select::cuda(body, frit_select::Options::default()).is_some_and(|selected| {
        let mut all = selected.generated.iter();
        all.all(|(body, kind)| frit_codegen::supported_on_cuda(body, *kind).is_ok())
    })
}

/// Multiprocessors of an H100.
const MULTIPROCESSORS: u32 = 132;

/// Whether a region is generated on CUDA. One that reduces rows and columns needs rows for every multiprocessor of a large GPU, since
/// each of its blocks processes many.
fn generates_on_cuda(body: &Graph, kind: FusionKind) -> bool {
    frit_codegen::cuda_metadata("kernel", body, kind).is_ok_and(|kernel| {
        kind != FusionKind::RowColReduce || kernel.launches[0].grid[0] >= MULTIPROCESSORS
    })
}
