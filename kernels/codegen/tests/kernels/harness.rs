//! Compiles regions, runs them on tensors, and compares with expected values.

use crate::ptx_machine;
use frit_codegen::{HostObject, HostTarget, KernelMeta, compile_cuda, compile_host};
use frit_ir::ops::{FusionKind, Input};
use frit_ir::{DType, Graph, Op, Origin, OutputKind, Region, Tensor, TensorType, ValueId};
use libloading::{Library, Symbol};
use std::ffi::c_void;

/// A region under construction.
pub(crate) struct Body(pub(crate) Graph);

impl Body {
    pub(crate) fn new() -> Self {
        Body(Graph::new("region"))
    }

    pub(crate) fn input(&mut self, dtype: DType, shape: &[usize]) -> ValueId {
        let name = format!("x{}", self.0.len());
        let ty = TensorType::new(dtype, shape);
        self.one(Op::Input(Input { name, ty }), &[])
    }

    pub(crate) fn constant(&mut self, dtype: DType, value: f64) -> ValueId {
        let value = Tensor::splat(TensorType::scalar(dtype), value);
        self.one(Op::Constant(frit_ir::ops::Constant { value }), &[])
    }

    pub(crate) fn one(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        self.all(op, inputs)[0]
    }

    pub(crate) fn all(&mut self, op: Op, inputs: &[ValueId]) -> Vec<ValueId> {
        self.0.add(op, inputs, Origin::none(), Region::Forward).unwrap()
    }

    pub(crate) fn done(mut self, outputs: &[ValueId]) -> Graph {
        for (i, &value) in outputs.iter().enumerate() {
            self.0.add_output(&format!("y{i}"), value, OutputKind::Result);
        }
        self.0
    }
}

/// A loaded shared object.
pub(crate) struct Loaded {
    library: Library,
    pub(crate) kernels: Vec<KernelMeta>,
}

pub(crate) fn load(object: HostObject) -> Loaded {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &object.so_bytes).unwrap();
    // SAFETY: the object has no initializers.
    let library = unsafe { Library::new(file.path()) }.unwrap();
    Loaded { library, kernels: object.kernels }
}

impl Loaded {
    /// Calls kernel `k` on a range of units.
    pub(crate) fn call(&self, k: usize, pointers: &[*mut c_void], range: std::ops::Range<usize>) {
        type Kernel = unsafe extern "C" fn(*const *mut c_void, i64, i64);
        let name = self.kernels[k].symbol.as_bytes();
        // SAFETY: the kernel takes this many addresses, each of a tensor of the type in its metadata.
        unsafe {
            let kernel: Symbol<'_, Kernel> = self.library.get(name).unwrap();
            kernel(pointers.as_ptr(), range.start as i64, range.end as i64);
        }
    }

    /// Runs kernel `k`, once whole and once in three ranges, and returns its results.
    pub(crate) fn run(&self, k: usize, inputs: &[Tensor]) -> Vec<Tensor> {
        let meta = &self.kernels[k];
        let n = meta.parallel_extent;
        let cuts = [0, n / 3, n / 2, n];
        let whole = self.run_ranges(k, inputs, std::slice::from_ref(&(0..n)));
        let ranges: Vec<_> = cuts.windows(2).map(|w| w[0]..w[1]).collect();
        let cut = self.run_ranges(k, inputs, &ranges);
        for (a, b) in whole.iter().zip(&cut) {
            assert_eq!(
                a.to_bytes(),
                b.to_bytes(),
                "{}: dividing the range changes bits",
                meta.symbol
            );
        }
        whole
    }

    fn run_ranges(
        &self,
        k: usize,
        inputs: &[Tensor],
        ranges: &[std::ops::Range<usize>],
    ) -> Vec<Tensor> {
        let meta = &self.kernels[k];
        let operands: Vec<&TensorType> = inputs.iter().map(|t| &t.ty).collect();
        assert_eq!(operands, meta.operands.iter().collect::<Vec<_>>());
        let mut buffers: Vec<Vec<u8>> = inputs.iter().map(Tensor::to_bytes).collect();
        // Results are surrounded by a pattern that must survive.
        const GUARD: usize = 64;
        for ty in &meta.results {
            buffers.push(vec![0xA5; ty.bytes() + 2 * GUARD]);
        }
        let mut pointers: Vec<*mut c_void> = Vec::new();
        for (i, buffer) in buffers.iter_mut().enumerate() {
            let guard = if i < inputs.len() { 0 } else { GUARD };
            pointers.push(buffer[guard..].as_mut_ptr().cast());
        }
        for range in ranges {
            self.call(k, &pointers, range.clone());
        }
        for (buffer, input) in buffers.iter().zip(inputs) {
            assert_eq!(*buffer, input.to_bytes(), "{}: an operand was written", meta.symbol);
        }
        let results = buffers[inputs.len()..].iter().zip(&meta.results);
        results
            .map(|(buffer, ty)| {
                let (head, rest) = buffer.split_at(GUARD);
                let (body, tail) = rest.split_at(ty.bytes());
                let intact = head.iter().chain(tail).all(|&b| b == 0xA5);
                assert!(intact, "{}: written outside of {ty}", meta.symbol);
                Tensor::from_bytes(ty.clone(), body).unwrap()
            })
            .collect()
    }
}

/// A region with operands, expected results and the allowed error.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) body: Graph,
    pub(crate) kind: FusionKind,
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) expected: Vec<Vec<f64>>,
    /// Allowed error relative to max(|expected|, `floor`).
    pub(crate) tolerance: f64,
    pub(crate) floor: f64,
}

/// Compiles all cases together for this machine and checks each.
pub(crate) fn check(cases: &[Case]) {
    check_on(cases, &HostTarget::native());
}

pub(crate) fn check_on(cases: &[Case], target: &HostTarget) {
    let symbols: Vec<String> = (0..cases.len()).map(|i| format!("k{i}")).collect();
    let regions: Vec<(&str, &Graph, FusionKind)> =
        cases.iter().zip(&symbols).map(|(c, s)| (s.as_str(), &c.body, c.kind)).collect();
    let loaded = load(compile_host(&regions, target).unwrap());
    for (k, case) in cases.iter().enumerate() {
        for (r, (result, expected)) in
            loaded.run(k, &case.inputs).iter().zip(&case.expected).enumerate()
        {
            let what = format!("{}, result {r}", case.name);
            compare(&what, result, expected, case.tolerance, case.floor);
        }
    }
}

/// Checks the same on this machine and on the PTX machine; there with `factor` times the tolerance.
pub(crate) fn check_everywhere(cases: &[Case], factor: f64) {
    check(cases);
    for case in cases {
        let module = compile_cuda(&[("k", &case.body, case.kind)], "sm_80").unwrap();
        assert!(!module.ptx.contains(".extern"), "{}", module.ptx);
        for (r, result) in ptx_machine::run(&module, &case.inputs).iter().enumerate() {
            let what = format!("{} on CUDA, result {r}", case.name);
            compare(&what, result, &case.expected[r], factor * case.tolerance, case.floor);
        }
    }
}

/// Checks a result; low-precision results may be adjacent to the expected value.
pub(crate) fn compare(what: &str, result: &Tensor, expected: &[f64], tolerance: f64, floor: f64) {
    let rounding = match result.dtype() {
        DType::BF16 => 1.0 / 128.0,
        DType::F16 => 1.0 / 1024.0,
        _ => 0.0,
    };
    let found = result.to_f64s();
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (&y, &e)) in found.iter().zip(expected).enumerate() {
        let allowed = tolerance * e.abs().max(floor) + rounding * e.abs() + f64::MIN_POSITIVE;
        let same = y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() <= allowed;
        assert!(same, "{what}, element {i}: {y:e}, expected {e:e}, off by {:e}", (y - e).abs());
    }
}

/// Deterministic values, roughly normal with this scale.
pub(crate) fn normal(dtype: DType, shape: &[usize], seed: u64, scale: f64) -> Tensor {
    let mut random = fastrand::Rng::with_seed(seed);
    let n: usize = shape.iter().product();
    let values = (0..n).map(|_| ((0..6).map(|_| random.f64()).sum::<f64>() - 3.0) * 1.41 * scale);
    Tensor::floats(dtype, shape, values.collect())
}

/// Sizes with and without tails, below and above every unrolling.
pub(crate) const COLS: [usize; 7] = [1, 7, 16, 17, 253, 768, 1000];
/// The float types of memory.
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
