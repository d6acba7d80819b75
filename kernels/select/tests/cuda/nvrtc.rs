//! Every source compiles with NVRTC for the supported architectures, assembles, and spills no registers.
//!
//! `FRIT_NVRTC` names libnvrtc and `FRIT_PTXAS` the assembler; `.ci/setup.sh --ptxas` prints both.

use crate::batch_norm_last::{self, Around};
use crate::check::body_of;
use crate::dropout::drawing_bodies;
use crate::images_last::{first_layer, grad_weight_body};
use frit_ir::ops::attention::Sight;
use frit_ir::ops::{
    Adafactor, AdafactorPart, ArgReduce, Attention, AttentionGrad, BatchNorm, Cast, Conv,
    ConvGradInput, ConvGradWeight, CumSum, Embedding, EmbeddingGrad, Expand, Gather, GradStats,
    MatMul, MaxPoolGrad, Pad, Quantize, Random, RandomFn, RandomMask, Reduce, ReduceFn,
    ScatterElements, ScatterFn, Window,
};
use frit_ir::plan::Launch;
use frit_ir::{DType, Graph, Op, TensorType};
use frit_tests::requirements::Requirement;
use std::collections::{BTreeSet, HashSet};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::process::Command;
use std::ptr::{null, null_mut};

/// A source, and its macro definitions.
type Unit = (String, Vec<(String, String)>);

/// The sources launched by these operations on operands of these types.
fn units(bodies: &[(Op, Vec<TensorType>)]) -> Vec<Unit> {
    let graph = |(op, types): &(Op, Vec<TensorType>)| {
        body_of(op.clone(), &types.iter().collect::<Vec<_>>())
    };
    units_of(&bodies.iter().map(graph).collect::<Vec<_>>())
}

fn units_of(bodies: &[Graph]) -> Vec<Unit> {
    let mut seen = HashSet::new();
    let mut units = Vec::new();
    for body in bodies {
        let selected = frit_select::cuda(body, frit_select::Options::default())
            .unwrap_or_else(|| panic!("no launches for\n{body}"));
        for launch in selected.entry.every_launch() {
            let Launch::Source(kernel) = launch else { continue };
            let unit = (kernel.file.clone(), kernel.defines.clone());
            if seen.insert(unit.clone()) {
                units.push(unit);
            }
        }
    }
    units
}

/// Every source, with the definitions of the operations that launch it.
fn all_units() -> Vec<Unit> {
    let mut all = units(&bodies());
    all.extend(units_of(&[
        crate::epilogue::forward(DType::BF16, true, true, 64),
        crate::quantize::matmul(
            MatMul { trans_a: true, ..MatMul::default() },
            DType::F8E5M2,
            0,
            false,
            false,
        ),
    ]));
    let widths = [(DType::BF16, 64), (DType::F16, 64), (DType::F32, 64), (DType::BF16, 3)];
    let last = |(dtype, channels)| {
        batch_norm_last::forward(dtype, &[2, 8, 8, channels], Around::Relu, [0, 1, 2])
    };
    all.extend(units_of(&widths.map(last)));
    // Of different tiles, chosen by channels, filters and size.
    let same = Window { low: vec![1, 1], high: vec![1, 1], ..Window::plain(2) };
    let grads = [[64, 64, 56], [128, 128, 28], [256, 256, 14], [512, 512, 7], [8, 64, 4]];
    all.extend(units_of(&grads.map(|[c, m, size]| {
        let (x, w) = ([256, c, size, size], [m, c, 3, 3]);
        grad_weight_body(DType::BF16, Some(DType::F32), &same, [&x, &w])
    })));
    all.extend(units_of(&first_layer()));
    all.extend(units_of(&drawing_bodies(DType::F32, 64, false)));
    // It is launched by collectives.
    for ranks in [2, 64] {
        all.push(("rank_sum".into(), vec![("RANKS".into(), ranks.to_string())]));
    }
    all
}

/// Attention and its gradient for heads of size `d`.
fn attention(
    dtype: DType,
    d: usize,
    causal: bool,
    mask: Option<DType>,
) -> Vec<(Op, Vec<TensorType>)> {
    local_attention(dtype, d, Sight { causal, window: None }, mask)
}

fn local_attention(
    dtype: DType,
    d: usize,
    Sight { causal, window }: Sight,
    mask: Option<DType>,
) -> Vec<(Op, Vec<TensorType>)> {
    let q = TensorType::new(dtype, [2, 4, 256, d]);
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let lse = TensorType::new(wide, [2, 4, 256]);
    let mask_grad = mask.is_some_and(DType::is_float);
    let mask = mask.map(|dtype| TensorType::new(dtype, [1, 4, 256, 256]));
    let mut forward = vec![q.clone(), q.clone(), q.clone()];
    let mut backward = vec![q.clone(), q.clone(), q.clone(), q.clone(), q, lse];
    forward.extend(mask.clone());
    backward.extend(mask);
    vec![
        (Op::Attention(Attention { scale: 0.1, causal, window, keep: None }), forward),
        (
            Op::AttentionGrad(AttentionGrad { scale: 0.1, causal, window, keep: None, mask_grad }),
            backward,
        ),
    ]
}

/// Convolution of as many channels to as many filters, and its gradients.
fn convolution(dtype: DType, channels: usize) -> Vec<(Op, Vec<TensorType>)> {
    let image = TensorType::new(dtype, [2, channels, 32, 32]);
    let weight = TensorType::new(dtype, [channels, channels, 3, 3]);
    let window = || Window { low: vec![1, 1], high: vec![1, 1], ..Window::plain(2) };
    let (size, taps) = (vec![32, 32], vec![3, 3]);
    vec![
        (
            Op::Conv(Conv { window: window(), groups: 1, out: None }),
            vec![image.clone(), weight.clone()],
        ),
        (
            Op::ConvGradInput(ConvGradInput { window: window(), groups: 1, size, out: None }),
            vec![image.clone(), weight],
        ),
        (
            Op::ConvGradWeight(ConvGradWeight {
                window: window(),
                groups: 1,
                taps,
                out: Some(DType::F32),
            }),
            vec![image.clone(), image],
        ),
    ]
}

/// Operations that together launch every source.
fn bodies() -> Vec<(Op, Vec<TensorType>)> {
    let ty = |dtype, dims: &[usize]| TensorType::new(dtype, dims);
    let (f, b, i) = (DType::F32, DType::BF16, DType::I64);
    let image = ty(b, &[2, 3, 8, 8]);
    let window = Window::plain(2);
    let low = vec![1, 0];
    let draws = |f| Op::Random(Random { f, shape: [64].into(), offset: 0.0, scale: 1.0, id: 0 });
    let scatter = ScatterElements { axis: 0, f: ScatterFn::Add };
    let mut all = vec![
        (Op::Cast(Cast { to: b }), vec![ty(f, &[64])]),
        (Op::Expand(Expand { shape: [4, 16, 64].into() }), vec![ty(b, &[16, 64])]),
        (Op::Pad(Pad { low: low.clone(), high: low, value: 1.0 }), vec![ty(b, &[4, 8])]),
        (Op::Embedding(Embedding::default()), vec![ty(b, &[9, 64]), ty(i, &[5])]),
        (
            Op::EmbeddingGrad(EmbeddingGrad { rows: 9, dtype: f }),
            vec![ty(b, &[5, 64]), ty(i, &[5])],
        ),
        (Op::Gather(Gather { axis: 0 }), vec![ty(b, &[9, 64]), ty(i, &[5])]),
        (Op::ScatterElements(scatter), vec![ty(f, &[9, 4]), ty(i, &[5, 4]), ty(f, &[5, 4])]),
        (
            Op::Reduce(Reduce { f: ReduceFn::Max, axes: vec![0], keep_dims: false }),
            vec![ty(b, &[9, 64])],
        ),
        (Op::CumSum(CumSum { axis: 0, exclusive: true, reverse: false }), vec![ty(f, &[9, 4])]),
        (Op::ArgReduce(ArgReduce { axis: 1, largest: true, last: false }), vec![ty(f, &[9, 4])]),
        (Op::RandomMask(RandomMask { shape: [64].into(), keep: 0.9, id: 0 }), vec![ty(i, &[5])]),
        (draws(RandomFn::Uniform), vec![ty(i, &[5])]),
        (draws(RandomFn::Normal), vec![ty(i, &[5])]),
        (Op::GradStats(GradStats::default()), vec![ty(f, &[64])]),
        (Op::GradStats(GradStats { exact: true }), vec![ty(f, &[64])]),
        // More operands than one launch reads.
        (Op::GradStats(GradStats { exact: true }), vec![ty(f, &[64]); 130]),
        (Op::RoundStats, vec![ty(f, &[43])]),
        (Op::TreeSum, vec![ty(f, &[64]), ty(i, &[]), ty(f, &[64])]),
        (Op::TreeSum, [vec![ty(f, &[64]), ty(i, &[])], vec![ty(f, &[64]); 6]].concat()),
        (Op::Quantize(Quantize { to: DType::F8E4M3, index: 0 }), vec![ty(b, &[64]), ty(f, &[1])]),
        (Op::BatchNorm(BatchNorm { eps: 1e-5 }), vec![image.clone(), ty(f, &[3]), ty(f, &[3])]),
        (
            Op::MaxPoolGrad(MaxPoolGrad { window: window.clone(), taps: vec![2, 2] }),
            vec![ty(b, &[2, 3, 7, 7]), image.clone()],
        ),
        (
            // Taps and windows that are not unrolled.
            Op::MaxPoolGrad(MaxPoolGrad { window: Window::plain(2), taps: vec![20, 20] }),
            vec![ty(b, &[2, 3, 5, 13]), ty(b, &[2, 3, 24, 32])],
        ),
    ];
    all.extend(convolution(f, 4));
    all.extend(convolution(b, 64));
    all.extend(convolution(b, 128));
    let adafactor = |part, shapes: &[usize], scalars: usize| {
        let mut operands = vec![ty(i, &[1]), ty(f, &[20])];
        operands.extend(shapes.iter().map(|n| ty(f, &[*n])));
        operands.extend(vec![ty(f, &[]); scalars]);
        (Op::Adafactor(Adafactor { part, shape: [9, 4].into(), share: 0.5 }), operands)
    };
    all.push(adafactor(AdafactorPart::Sums, &[20], 2));
    all.push(adafactor(AdafactorPart::Moments, &[14, 13], 5));
    all.push(adafactor(AdafactorPart::Step, &[20, 13], 10));
    all.extend(attention(f, 64, false, Some(f)));
    all.extend(attention(b, 64, true, None));
    let window = Some(100);
    all.extend(local_attention(f, 64, Sight { causal: false, window }, Some(f)));
    all
}

/// The functions of libnvrtc that are used here.
struct Nvrtc(libloading::Library);

impl Nvrtc {
    fn find() -> Option<Nvrtc> {
        let path = Requirement::Nvrtc.find()?;
        // SAFETY: NVIDIA's library has no initializers that matter here.
        let library = unsafe { libloading::Library::new(&path) };
        Some(Nvrtc(library.unwrap_or_else(|e| panic!("{}: {e}", path.display()))))
    }

    /// The PTX of a unit.
    fn compile(&self, (file, defines): &Unit, arch: &str) -> String {
        type Create = unsafe extern "C" fn(
            *mut *mut c_void,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Compile = unsafe extern "C" fn(*mut c_void, c_int, *const *const c_char) -> c_int;
        type Size = unsafe extern "C" fn(*mut c_void, *mut usize) -> c_int;
        type Text = unsafe extern "C" fn(*mut c_void, *mut c_char) -> c_int;
        type Destroy = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
        let source = frit_kernels::cuda::source(file).expect("a source");
        let source = CString::new(source).unwrap();
        let mut options = vec![format!("--gpu-architecture={arch}"), "--std=c++17".into()];
        options.extend(defines.iter().map(|(k, v)| format!("-D{k}={v}")));
        let options: Vec<CString> = options.into_iter().map(|o| CString::new(o).unwrap()).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the signatures are those of nvrtc.h; all strings outlive the calls.
        unsafe {
            let text = |size: &[u8], text: &[u8], program: *mut c_void| {
                let mut n = 0;
                self.0.get::<Size>(size).unwrap()(program, &mut n);
                let mut bytes = vec![0_u8; n.max(1)];
                self.0.get::<Text>(text).unwrap()(program, bytes.as_mut_ptr().cast());
                let string = CStr::from_bytes_until_nul(&bytes).unwrap();
                string.to_string_lossy().into_owned()
            };
            let (mut program, name) = (null_mut(), c"source.cu".as_ptr());
            let create = self.0.get::<Create>(b"nvrtcCreateProgram").unwrap();
            assert_eq!(create(&mut program, source.as_ptr(), name, 0, null(), null()), 0);
            let compile = self.0.get::<Compile>(b"nvrtcCompileProgram").unwrap();
            let status = compile(program, pointers.len() as c_int, pointers.as_ptr());
            let log = text(b"nvrtcGetProgramLogSize", b"nvrtcGetProgramLog", program);
            assert_eq!(status, 0, "{file} for {arch} with {defines:?}:\n{log}");
            assert!(log.is_empty(), "{file} for {arch} with {defines:?}:\n{log}");
            let ptx = text(b"nvrtcGetPTXSize", b"nvrtcGetPTX", program);
            self.0.get::<Destroy>(b"nvrtcDestroyProgram").unwrap()(&mut program);
            ptx
        }
    }
}

/// Assembles PTX; no kernel may keep registers or arrays in local memory.
fn assemble(unit: &Unit, ptx: &str, arch: &str) {
    let Some(ptxas) = Requirement::Ptxas.find() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("source.ptx");
    std::fs::write(&path, ptx).unwrap();
    let mut command = Command::new(ptxas);
    command
        .args(["-v", "-arch", arch])
        .arg(&path)
        .arg("-o")
        .arg(folder.path().join("source.cubin"));
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{unit:?} for {arch}: {said}");
    // Tiles are sized for Ampere and Hopper; elsewhere a few registers may be spilled.
    let is_sized = arch != "sm_100";
    for line in said.lines().filter(|line| is_sized && line.contains("spill")) {
        assert!(line.trim().starts_with("0 bytes stack frame"), "{unit:?} for {arch}: {said}");
    }
}

/// For which sources are compiled and assembled: Ampere, Hopper, Blackwell.
const ARCHITECTURES: [(&str, &str); 3] =
    [("compute_80", "sm_80"), ("compute_90", "sm_90"), ("compute_100", "sm_100")];

#[test]
fn the_bodies_launch_every_source() {
    let launched: BTreeSet<String> = all_units().into_iter().map(|(file, _)| file).collect();
    let sources = frit_kernels::cuda::SOURCES.iter();
    let all: BTreeSet<String> = sources.map(|(name, _)| name.to_string()).collect();
    assert_eq!(launched, all);
}

/// Compiles and assembles sources for every architecture.
fn check(units: impl IntoIterator<Item = Unit>) {
    let Some(nvrtc) = Nvrtc::find() else { return };
    for unit in units {
        for (virtual_arch, arch) in ARCHITECTURES {
            assemble(&unit, &nvrtc.compile(&unit, virtual_arch), arch);
        }
    }
}

// Each half takes minutes, and both can be compiled at once.

#[test]
fn every_other_source_compiles_for_every_architecture() {
    check(all_units().into_iter().step_by(2));
}

#[test]
fn the_sources_between_compile_for_every_architecture() {
    check(all_units().into_iter().skip(1).step_by(2));
}

#[test]
fn attention_with_masks_and_heads_up_to_256_spills_nothing() {
    let mut bodies = attention(DType::F16, 64, true, Some(DType::Bool));
    bodies.extend(attention(DType::BF16, 128, true, None));
    let window = Some(100);
    bodies.extend(local_attention(DType::BF16, 128, Sight { causal: true, window }, None));
    bodies.extend(local_attention(DType::F16, 64, Sight { causal: false, window }, None));
    bodies.extend(attention(DType::BF16, 128, false, Some(DType::Bool)));
    for d in [160, 192, 256] {
        bodies.extend(attention(DType::BF16, d, true, None));
    }
    bodies.extend(attention(DType::F16, 256, false, Some(DType::F32)));
    check(units(&bodies));
}

#[test]
fn attention_that_drops_weights_spills_nothing() {
    for d in [64, 128, 256] {
        check(units_of(&drawing_bodies(DType::BF16, d, true)));
    }
}
