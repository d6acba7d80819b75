//! The real library, without a GPU: whether it has engines for the operations of plans.

use super::operations::{attentions, awkward_convolutions, norms, operations_of_models, pools};
use crate::support::file;
use frit_cuda::cudnn::Cudnn;
use frit_ir::DType;
use frit_ir::plan::{Operation, OperationKind, Strided};
use frit_tests::requirements::Requirement;
use std::path::Path;
use std::process::Command;

/// A GPU that is not there, as cuDNN describes them: name, compute capability, multiprocessors, shared memory of each,
/// and level 2 cache in bytes, from NVIDIA's data sheets.
fn described(name: &str, version: u32, processors: u32, shared: u32, cache: u32) -> String {
    let block = shared - 1024;
    format!(
        r#"{{"name":"{name}","deviceName":"{name}","deviceVer":{version},"driverVer":13000,"cudaVer":13000,
        "cudaDeviceId":0,"pciDeviceId":0,"multiProcessorCount":{processors},"warpSize":32,"isTccDriver":0,
        "maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,
        "smClockRateKHz":1410000,"memClockRateKHz":1593000,"l2CacheSize":{cache},
        "maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":{block},
        "reservedSharedMemoryPerBlock":1024,"oversizedSharedMemoryPerBlock":0,"sharedMemoryPerSM":{shared},
        "maxSharedMemoryPerSM":{shared},"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,
        "maxThreadsPerSM":2048,"supportCoopLaunch":1,"totalGlobalMem":84929347584}}"#
    )
}

/// Convolutions and their gradients of which the results have another type.
fn widens(operation: &Operation) -> bool {
    let OperationKind::Conv { .. } = operation.kind else { return false };
    matches!(&operation.tensors[..], [image, filters, _] if image.dtype != filters.dtype)
}

/// Operations that have no engine on a GPU of this compute capability: sums of 2-byte elements that are written as f32,
/// of groups before sm_90, and of numbers of channels that are no multiple of eight.
fn is_unsupported(operation: &Operation, version: u32) -> bool {
    let [image, filters, _] = &operation.tensors[..] else { return false };
    let grouped = image.sizes[1] != filters.sizes[1];
    let uneven = filters.sizes[..2].iter().any(|n| !n.is_multiple_of(8));
    widens(operation) && (uneven || (grouped && version < 900))
}

/// Batch normalizations that plans do not ask for, because no engine knows their elements, or takes their channels 16
/// bytes at once.
fn unknown_norms() -> Vec<Operation> {
    let norm = |dtype, channels, statistics| {
        let image = Strided::dense(dtype, &[2, channels, 1, 64]);
        let vector = Strided::dense(statistics, &[1, channels, 1, 1]);
        let tensors = [&image, &vector, &vector, &image, &vector, &vector];
        Operation {
            kind: OperationKind::BatchNorm { eps_bits: 1e-5_f32.to_bits() },
            tensors: tensors.map(Clone::clone).into(),
            any_order: false,
        }
    };
    let (f32, f64) = (DType::F32, DType::F64);
    vec![norm(DType::BF16, 12, f32), norm(DType::F16, 4, f32), norm(f32, 2, f32), norm(f64, 8, f64)]
}

/// A driver without a GPU, in a folder: the library compiles some engines only if it finds one.
fn driver_without_gpu(dir: &Path) {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let status = Command::new(&compiler)
        .args(["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(dir.join("libcuda.so.1"))
        .arg(file("tests/suite/cudnn/libcuda.c"))
        .arg("-ldl")
        .status()
        .unwrap_or_else(|e| panic!("{compiler}: {e}"));
    assert!(status.success(), "the driver does not compile");
}

/// Looks for engines in a process of its own, which alone sees the driver without a GPU.
#[test]
fn the_real_library_has_a_deterministic_engine_for_every_operation() {
    let Some(libraries) = Requirement::Cudnn.find() else { return };
    if std::env::var_os("FRIT_CUDNN_CHILD").is_some() {
        return look_for_engines();
    }
    let dir = tempfile::tempdir().expect("a directory");
    driver_without_gpu(dir.path());
    let compiler = Requirement::Nvrtc.find();
    let compiler = compiler.as_deref().and_then(Path::parent).map(Path::to_path_buf);
    let folders =
        std::env::join_paths(std::env::split_paths(&libraries).chain(compiler)).expect("paths");
    let name = "cudnn::engines::the_real_library_has_a_deterministic_engine_for_every_operation";
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--nocapture"])
        .env("FRIT_CUDNN_CHILD", "1")
        .env("LD_LIBRARY_PATH", dir.path())
        .env("FRIT_CUDA_PATH", folders)
        .output()
        .expect("this program starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stdout));
    eprintln!("{said}");
}

/// Why none of the engines that are offered becomes a plan of execution, if none does.
fn problem(cudnn: &Cudnn, operation: &Operation) -> Option<String> {
    let workspace_bytes = operation.workspace_bytes();
    let engines = match cudnn.engines(operation, workspace_bytes) {
        Ok(engines) => engines,
        Err(e) => return Some(e.to_string()),
    };
    let mut reason = "no engine".to_string();
    for engine in &engines {
        match cudnn.prepare(operation, engine, workspace_bytes) {
            Ok(_) => return None,
            Err(e) => reason = e.to_string(),
        }
    }
    Some(reason)
}

fn look_for_engines() {
    let mut operations = operations_of_models();
    assert!(operations.len() > 30, "{}", operations.len());
    operations.extend(awkward_convolutions());
    let (attentions, pools, norms) = (attentions(), pools(), norms());
    assert_eq!(attentions.len(), 23, "seven with two gradients: {:?}", attentions.keys());
    assert_eq!(pools.len(), 4 * 22, "two without sums: {:?}", pools.keys());
    assert_eq!(norms.len(), 2 * 8, "{:?}", norms.keys());
    operations.extend(attentions.into_iter().chain(pools).chain(norms));
    let (mut wrong, mut ready) = (Vec::new(), 0);
    for (version, device) in [
        (800, described("NVIDIA A100", 800, 108, 167_936, 41_943_040)),
        (900, described("NVIDIA H100", 900, 132, 233_472, 52_428_800)),
    ] {
        let cudnn = Cudnn::for_described(&device).unwrap_or_else(|e| panic!("{e}"));
        for operation in unknown_norms() {
            if problem(&cudnn, &operation).is_none() {
                wrong.push(format!("sm_{version} {operation}: has an engine"));
            }
        }
        let mut wide = 0;
        for (key, operation) in &operations {
            // On the older GPU the library needs seconds for each of these: one of three will do.
            let is_slow = version < 900 && widens(operation);
            wide += usize::from(is_slow);
            if is_slow && !wide.is_multiple_of(3) {
                continue;
            }
            let reason = problem(&cudnn, operation);
            ready += usize::from(reason.is_none());
            if reason.is_some() != is_unsupported(operation, version) {
                wrong.push(format!(
                    "sm_{version} {key}: {}",
                    reason.unwrap_or_else(|| "has an engine".into())
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    eprintln!("{ready} plans of execution are ready");
}
