//! `frit-run doctor`: what a machine has of what a plan needs, and where its libraries come from.

use crate::stand_ins::{FOLDER, Gpu};
use crate::support::{Planned, plan};

fn planned() -> Planned {
    let settings = ["target.device=cuda", "target.arch=sm_90", "sharding.ranks=2"];
    plan("tests/models/mlp/model.onnx", 4, &settings)
}

/// The line of one finding.
fn line<'a>(said: &'a str, what: &str) -> &'a str {
    let mut lines = said.lines();
    lines.find(|l| l.starts_with(what)).unwrap_or_else(|| panic!("no {what} in {said}"))
}

#[test]
fn versions_and_places_of_all_that_a_plan_needs_are_listed() {
    let planned = planned();
    let path = planned.path().display().to_string();
    let ended = Gpu::new().run(&["doctor", &path]);
    ended.expect_success();
    let folder = FOLDER.canonicalize().expect("a folder").display().to_string();
    for (what, version, library) in [
        ("driver", "CUDA 12.8, ", "libcuda.so.1"),
        ("cuBLASLt", "12.0.0, ", "libcublasLt.so.12"),
        ("NVRTC", ", ", "libnvrtc.so.12"),
        ("NCCL", "2.18.0, ", "libnccl.so.2"),
    ] {
        let line = line(&ended.said, what);
        let end = format!("{version}{folder}/{library}");
        assert!(line.contains(" found ") && line.ends_with(&end), "{line}");
    }
    assert!(line(&ended.said, "GPU 0").contains("H100 80GB HBM3, sm_90, 80.00 GiB"));
    assert!(line(&ended.said, "memory").contains(" on each rank's GPU of 80.00 GiB"));
}

#[test]
fn what_a_plan_lacks_is_named_with_a_remedy() {
    let planned = planned();
    let path = planned.path().display().to_string();
    for (variable, value, lacking, remedy) in [
        ("FRIT_DEVICE_MEMORY", "100000", "memory", "--bind batch"),
        ("FRIT_DEVICE_CAPABILITY", "80", "GPU 0", "target.arch = \"sm_80\""),
        ("FRIT_DEVICE_CAPABILITY", "0", "driver, memory", "no CUDA-capable device"),
        ("FRIT_DEVICE_VERSION", "11080", "driver, memory", "install driver 525"),
    ] {
        let ended = Gpu::new().with(variable, value).run(&["doctor", &path]);
        let complaint = format!("this machine lacks what the plan needs: {lacking}");
        assert_eq!(ended.code, Some(2), "{}", ended.said);
        assert!(ended.said.contains(&complaint), "{}", ended.said);
        assert!(ended.said.contains(remedy), "{}", ended.said);
        // Without a plan nothing is needed.
        assert_eq!(Gpu::new().with(variable, value).run(&["doctor"]).code, Some(0));
    }
}

#[test]
fn directories_that_the_user_names_come_before_those_of_the_dynamic_linker() {
    let gpu = Gpu::new();
    let named = |name: &str| {
        let folder = gpu.dir.path().join(name);
        std::fs::create_dir(&folder).expect("a folder");
        folder.canonicalize().expect("the folder")
    };
    let (first, second) = (named("first"), named("second"));
    // The one is no library; the other is of an older CUDA than the dynamic linker's.
    std::fs::write(first.join("libnccl.so.2"), "no library").expect("written");
    std::fs::copy(FOLDER.join("libcublasLt.so.12"), first.join("libcublasLt.so.12"))
        .expect("copied");
    for name in ["libnccl.so.2", "libcublasLt.so.12"] {
        std::fs::copy(FOLDER.join(name), second.join(name)).expect("copied");
    }
    let path = std::env::join_paths([&first, &second]).expect("paths");
    let path = path.into_string().expect("Unicode");
    let gpu = gpu.with("FRIT_CUDA_PATH", path).with("FRIT_DEVICE_VERSION", 13000);
    let ended = gpu.run(&["doctor"]);
    ended.expect_success();
    for (what, place) in [
        ("cuBLASLt", first.join("libcublasLt.so.12")),
        ("NCCL", second.join("libnccl.so.2")),
        ("driver", FOLDER.join("libcuda.so.1")),
    ] {
        let line = line(&ended.said, what);
        assert!(line.ends_with(&place.display().to_string()), "{line}");
    }
}

#[test]
fn what_a_gpu_reaches_is_measured() {
    let ended = Gpu::new().run(&["doctor", "--measure=64"]);
    ended.expect_success();
    assert!(line(&ended.said, "GEMM").contains("bf16 64x64x64: "), "{}", ended.said);
    assert!(line(&ended.said, "GEMM").ends_with("TFLOP/s, best of 2 algorithms"), "{}", ended.said);
    assert!(line(&ended.said, "copy").ends_with("GB/s read and written"), "{}", ended.said);
    assert!(ended.count("call cuMemcpyDtoDAsync_v2") > 1);
    let too_little =
        Gpu::new().with("FRIT_DEVICE_MEMORY", 1 << 20).run(&["doctor", "--measure=1024"]);
    assert_eq!(too_little.code, Some(2), "{}", too_little.said);
    assert!(too_little.said.contains("measure a smaller GEMM"), "{}", too_little.said);
}
