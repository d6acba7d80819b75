//! GEMMs through cuBLASLt. The library is column-major; a row-major `d = a · b` is computed as `dᵀ = bᵀ · aᵀ`, by
//! swapping the operands without transposing memory.

use super::driver::{Address, Algorithm, GemmAddresses, GemmHandle, StreamHandle};
use super::error::CudaError;
use super::gemm::{GemmProblem, Kind, Operand};
use super::library::{LibraryError, Wanted, functions};
use super::nvrtc::c_text;
use super::real::stream;
use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayout_t,
    cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cudaDataType_t,
};
use cudarc::driver::sys::CUstream;
use frit_ir::DType;
use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;

/// Algorithms that are asked for, to be measured.
const CANDIDATES: usize = 32;

/// The library's reply to a query for algorithms.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Candidate {
    algorithm: cublasLtMatmulAlgo_t,
    workspace_bytes: usize,
    /// A status, zero if it can be used; an integer, since newer libraries may add values.
    state: u32,
    waves: f32,
    reserved: [c_int; 4],
}

functions! {
    /// The library's functions.
    Api {
        cublasLtGetVersion: fn() -> usize,
        cublasLtGetStatusString: fn(u32) -> *const c_char,
        cublasLtCreate: fn(*mut cublasLtHandle_t) -> u32,
        cublasLtMatmulDescCreate: fn(*mut cublasLtMatmulDesc_t, cublasComputeType_t, cudaDataType_t) -> u32,
        cublasLtMatmulDescSetAttribute: fn(cublasLtMatmulDesc_t, Attribute, *const c_void, usize) -> u32,
        cublasLtMatrixLayoutCreate: fn(*mut cublasLtMatrixLayout_t, cudaDataType_t, u64, u64, i64) -> u32,
        cublasLtMatrixLayoutSetAttribute: fn(cublasLtMatrixLayout_t, LayoutAttribute, *const c_void, usize) -> u32,
        cublasLtMatmulPreferenceCreate: fn(*mut cublasLtMatmulPreference_t) -> u32,
        cublasLtMatmulPreferenceSetAttribute: fn(cublasLtMatmulPreference_t, Preference, *const c_void, usize) -> u32,
        cublasLtMatmulPreferenceDestroy: fn(cublasLtMatmulPreference_t) -> u32,
        cublasLtMatmulAlgoGetHeuristic: fn(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, c_int, *mut Candidate, *mut c_int) -> u32,
        cublasLtMatmul: fn(cublasLtHandle_t, cublasLtMatmulDesc_t, *const c_void, *const c_void, cublasLtMatrixLayout_t, *const c_void, cublasLtMatrixLayout_t, *const c_void, *const c_void, cublasLtMatrixLayout_t, *mut c_void, cublasLtMatrixLayout_t, *const cublasLtMatmulAlgo_t, *mut c_void, usize, CUstream) -> u32,
    }
}

/// The library, of the newest major version of CUDA that the driver supports.
pub(super) fn library(driver: (u32, u32)) -> Wanted {
    Wanted {
        what: "cuBLASLt",
        names: match driver.0 {
            12 => &["libcublasLt.so.12"],
            _ => &["libcublasLt.so.13", "libcublasLt.so.12"],
        },
        companion: None,
        remedy: "install CUDA 12, or `pip install nvidia-cublas-cu12`",
    }
}

type Result<T = ()> = std::result::Result<T, CudaError>;

/// Where the library is, and its version.
///
/// # Errors
/// If it cannot be loaded.
pub(super) fn find(driver: (u32, u32)) -> std::result::Result<(String, usize), LibraryError> {
    let loaded = library(driver).load()?;
    let api = Api::of(&loaded)?;
    // SAFETY: no arguments to get wrong.
    Ok((loaded.path, unsafe { (api.cublasLtGetVersion)() }))
}

/// The library's descriptors of a GEMM, which live as long as the process.
struct Described {
    description: cublasLtMatmulDesc_t,
    /// In the library's order: bᵀ, aᵀ, dᵀ.
    layouts: [cublasLtMatrixLayout_t; 3],
    algorithm: cublasLtMatmulAlgo_t,
    double: bool,
    /// Whether the operands are 8-bit floats, each with a scale.
    scaled: bool,
    epilogue: Kind,
}

/// The library.
pub(super) struct CublasLt {
    api: Api,
    /// Its version.
    pub(super) version: usize,
    handle: cublasLtHandle_t,
    problems: RefCell<Vec<Described>>,
}

impl CublasLt {
    /// Loads it; a context must be current.
    ///
    /// # Errors
    /// If it is missing or too old, or finds no GPU.
    pub(super) fn open(driver: (u32, u32)) -> Result<CublasLt> {
        let loaded = library(driver).load()?;
        let api = Api::of(&loaded)?;
        // SAFETY: no arguments to get wrong.
        let version = unsafe { (api.cublasLtGetVersion)() };
        let mut library =
            CublasLt { api, version, handle: null_mut(), problems: RefCell::default() };
        let mut handle = null_mut();
        // SAFETY: the pointer is valid.
        let code = unsafe { (library.api.cublasLtCreate)(&mut handle) };
        library.check("cublasLtCreate", code)?;
        library.handle = handle;
        Ok(library)
    }

    /// Name and version.
    pub(super) fn name(&self) -> String {
        format!("cuBLASLt {}", self.version)
    }

    fn check(&self, call: &'static str, code: u32) -> Result {
        match code {
            0 => Ok(()),
            code => {
                // SAFETY: the text lives as long as the library.
                let reason = unsafe { c_text((self.api.cublasLtGetStatusString)(code)) };
                Err(CudaError::Call { call, reason })
            }
        }
    }

    /// Creates the library's descriptors of a GEMM.
    fn describe(&self, problem: &GemmProblem) -> Result<Described> {
        let double = problem.d.dtype == DType::F64;
        let (compute, scale) = match double {
            true => (cublasComputeType_t::CUBLAS_COMPUTE_64F, cudaDataType_t::CUDA_R_64F),
            false => (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType_t::CUDA_R_32F),
        };
        let mut description = null_mut();
        // SAFETY: the pointer is valid.
        let code = unsafe { (self.api.cublasLtMatmulDescCreate)(&mut description, compute, scale) };
        self.check("cublasLtMatmulDescCreate", code)?;
        // `cublasOperation_t`: 0 is not transposed, 1 is.
        let operation = |operand: &Operand| u32::from(operand.transposed);
        let set = |attribute, value| self.set(description, attribute, value);
        set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, operation(&problem.b))?;
        set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, operation(&problem.a))?;
        if !matches!(problem.epilogue, Kind::None | Kind::Add { bias: false }) {
            let epilogue = epilogue(problem.epilogue);
            set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue as u32)?;
            let dtype = data_type(problem.d.dtype)?;
            set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, dtype as u32)?;
        }
        if problem.epilogue.has_matrix() {
            // Its columns are our rows, which are contiguous.
            let distance = problem.n as i64;
            self.set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, distance)?;
        }
        let GemmProblem { m, n, k, batch, .. } = *problem;
        let layouts = [
            self.layout(&problem.b, [k, n], batch)?,
            self.layout(&problem.a, [m, k], batch)?,
            self.layout(&problem.d, [m, n], batch)?,
        ];
        let algorithm = cublasLtMatmulAlgo_t { data: [0; 8] };
        let scaled = problem.a.dtype.size() == 1;
        let epilogue = problem.epilogue;
        Ok(Described { description, layouts, algorithm, double, scaled, epilogue })
    }

    /// Sets the addresses of the scales and of the epilogue's vector and matrix.
    fn set_addresses(
        &self,
        of: &Described,
        [a, b]: [Address; 2],
        [vector, matrix]: [Address; 2],
    ) -> Result {
        if of.scaled {
            // Its A is our `b`.
            self.set(of.description, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, b)?;
            self.set(of.description, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, a)?;
        }
        if of.epilogue.has_vector() {
            let attribute = Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            self.set(of.description, attribute, vector)?;
        }
        if of.epilogue.has_matrix() {
            let attribute = Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER;
            self.set(of.description, attribute, matrix)?;
        }
        Ok(())
    }

    fn set(
        &self,
        description: cublasLtMatmulDesc_t,
        attribute: Attribute,
        value: impl Copy,
    ) -> Result {
        let (at, size) = ((&raw const value).cast(), size_of_val(&value));
        // SAFETY: the value has this size; the description was created.
        let code =
            unsafe { (self.api.cublasLtMatmulDescSetAttribute)(description, attribute, at, size) };
        self.check("cublasLtMatmulDescSetAttribute", code)
    }

    /// The library's layout of a row-major matrix: its columns are our rows.
    fn layout(
        &self,
        operand: &Operand,
        [rows, columns]: [usize; 2],
        batch: usize,
    ) -> Result<cublasLtMatrixLayout_t> {
        let (rows, columns) = if operand.transposed { (columns, rows) } else { (rows, columns) };
        let dtype = data_type(operand.dtype)?;
        let mut layout = null_mut();
        let distance = operand.row_stride as i64;
        let (height, width) = (columns as u64, rows as u64);
        // SAFETY: the pointer is valid.
        let code = unsafe {
            (self.api.cublasLtMatrixLayoutCreate)(&mut layout, dtype, height, width, distance)
        };
        self.check("cublasLtMatrixLayoutCreate", code)?;
        if batch != 1 {
            let (count, stride) = (batch as i32, operand.batch_stride as i64);
            // SAFETY: the values have the sizes said; the layout was created.
            let codes = unsafe {
                [
                    (self.api.cublasLtMatrixLayoutSetAttribute)(
                        layout,
                        LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                        (&raw const count).cast(),
                        size_of_val(&count),
                    ),
                    (self.api.cublasLtMatrixLayoutSetAttribute)(
                        layout,
                        LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                        (&raw const stride).cast(),
                        size_of_val(&stride),
                    ),
                ]
            };
            for code in codes {
                self.check("cublasLtMatrixLayoutSetAttribute", code)?;
            }
        }
        Ok(layout)
    }

    /// Limits of an algorithm.
    fn prefer(
        &self,
        problem: &GemmProblem,
        workspace_bytes: usize,
    ) -> Result<cublasLtMatmulPreference_t> {
        let mut preference = null_mut();
        // SAFETY: the pointer is valid.
        let code = unsafe { (self.api.cublasLtMatmulPreferenceCreate)(&mut preference) };
        self.check("cublasLtMatmulPreferenceCreate", code)?;
        let set = |attribute, value: &[u8]| {
            // SAFETY: the value has this size; the preference was created.
            let code = unsafe {
                let (at, size) = (value.as_ptr().cast(), value.len());
                (self.api.cublasLtMatmulPreferenceSetAttribute)(preference, attribute, at, size)
            };
            self.check("cublasLtMatmulPreferenceSetAttribute", code)
        };
        set(
            Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            &(workspace_bytes as u64).to_ne_bytes(),
        )?;
        use Preference as P;
        for (attribute, operand) in [
            (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &problem.b),
            (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &problem.a),
            (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &problem.d),
            (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &problem.d),
        ] {
            set(attribute, &(operand.alignment_bytes as u32).to_ne_bytes())?;
        }
        Ok(preference)
    }

    /// Algorithms for a GEMM within this workspace, in the library's order of expected speed.
    ///
    /// # Errors
    /// If the library refuses.
    pub(super) fn algorithms(
        &self,
        problem: &GemmProblem,
        workspace_bytes: usize,
    ) -> Result<Vec<Algorithm>> {
        let described = self.describe(problem)?;
        // Only the alignment of an address matters to the heuristic.
        let beside = problem.d.alignment_bytes as Address;
        self.set_addresses(&described, [256; 2], [beside; 2])?;
        let preference = self.prefer(problem, workspace_bytes)?;
        let nothing = Candidate {
            algorithm: described.algorithm,
            workspace_bytes: 0,
            state: u32::MAX,
            waves: 0.0,
            reserved: [0; 4],
        };
        let mut candidates = [nothing; CANDIDATES];
        let mut found: c_int = 0;
        let [b, a, d] = described.layouts;
        // SAFETY: everything was created; there is room for as many candidates as are asked for.
        let code = unsafe {
            (self.api.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                described.description,
                b,
                a,
                d,
                d,
                preference,
                CANDIDATES as c_int,
                candidates.as_mut_ptr(),
                &mut found,
            )
        };
        // SAFETY: created above, and used no more.
        let destroyed = unsafe { (self.api.cublasLtMatmulPreferenceDestroy)(preference) };
        self.check("cublasLtMatmulPreferenceDestroy", destroyed)?;
        self.check("cublasLtMatmulAlgoGetHeuristic", code).map_err(|e| CudaError::NoAlgorithm {
            library: self.name(),
            problem: format!("{problem} ({e})"),
        })?;
        let usable = |c: &&Candidate| c.state == 0 && c.workspace_bytes <= workspace_bytes;
        let found = &candidates[..found.max(0) as usize];
        Ok(found.iter().filter(usable).map(|c| c.algorithm.data).collect())
    }

    /// Prepares a GEMM.
    ///
    /// # Errors
    /// If the library refuses.
    pub(super) fn prepare(
        &self,
        problem: &GemmProblem,
        algorithm: &Algorithm,
    ) -> Result<GemmHandle> {
        let mut described = self.describe(problem)?;
        described.algorithm.data = *algorithm;
        let mut problems = self.problems.borrow_mut();
        problems.push(described);
        Ok(GemmHandle(problems.len() - 1))
    }

    /// Multiplies.
    ///
    /// # Safety
    /// The addresses must be valid when the GEMM runs.
    ///
    /// # Errors
    /// If the library refuses.
    pub(super) unsafe fn multiply(
        &self,
        problem: GemmHandle,
        at: GemmAddresses,
        on: StreamHandle,
    ) -> Result {
        let problems = self.problems.borrow();
        let described = &problems[problem.0];
        self.set_addresses(described, at.scales, [at.vector, at.matrix])?;
        let (one, zero) = ((1.0_f32, 1.0_f64), (0.0_f32, 0.0_f64));
        let scalar = |(single, double): &(f32, f64)| -> *const c_void {
            match described.double {
                true => (&raw const *double).cast(),
                false => (&raw const *single).cast(),
            }
        };
        let [b, a, d] = described.layouts;
        // `d = a · b + beta · c`, with c where d is unless something is added.
        let (beta, c) = match described.epilogue {
            Kind::Add { .. } => (scalar(&one), at.matrix),
            _ => (scalar(&zero), at.d),
        };
        // SAFETY: everything was created; by the contract of this function.
        let code = unsafe {
            (self.api.cublasLtMatmul)(
                self.handle,
                described.description,
                scalar(&one),
                at.b as *const c_void,
                b,
                at.a as *const c_void,
                a,
                beta,
                c as *const c_void,
                d,
                at.d as *mut c_void,
                d,
                &described.algorithm,
                at.workspace.0 as *mut c_void,
                at.workspace.1,
                stream(on),
            )
        };
        self.check("cublasLtMatmul", code)
    }
}

/// The library's name of an epilogue. Its A is our `b`.
fn epilogue(kind: Kind) -> cublasLtEpilogue_t {
    use cublasLtEpilogue_t as E;
    match kind {
        Kind::None | Kind::Add { bias: false } => E::CUBLASLT_EPILOGUE_DEFAULT,
        Kind::Add { bias: true } => E::CUBLASLT_EPILOGUE_BIAS,
        Kind::Bias => E::CUBLASLT_EPILOGUE_BIAS,
        Kind::Gelu { bias: false, before: false } => E::CUBLASLT_EPILOGUE_GELU,
        Kind::Gelu { bias: false, before: true } => E::CUBLASLT_EPILOGUE_GELU_AUX,
        Kind::Gelu { bias: true, before: false } => E::CUBLASLT_EPILOGUE_GELU_BIAS,
        Kind::Gelu { bias: true, before: true } => E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        Kind::GeluGrad { rows: false } => E::CUBLASLT_EPILOGUE_DGELU,
        Kind::GeluGrad { rows: true } => E::CUBLASLT_EPILOGUE_DGELU_BGRAD,
        Kind::SumB => E::CUBLASLT_EPILOGUE_BGRADA,
        Kind::SumA => E::CUBLASLT_EPILOGUE_BGRADB,
    }
}

fn data_type(dtype: DType) -> Result<cudaDataType_t> {
    Ok(match dtype {
        DType::F64 => cudaDataType_t::CUDA_R_64F,
        DType::F32 => cudaDataType_t::CUDA_R_32F,
        DType::F16 => cudaDataType_t::CUDA_R_16F,
        DType::BF16 => cudaDataType_t::CUDA_R_16BF,
        DType::F8E4M3 => cudaDataType_t::CUDA_R_8F_E4M3,
        DType::F8E5M2 => cudaDataType_t::CUDA_R_8F_E5M2,
        other => {
            let reason = format!("no GEMM of {other}");
            return Err(CudaError::Call { call: "cuBLASLt", reason });
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_has_every_function() {
        match library((u32::MAX, 0)).load() {
            Ok(loaded) => assert!(Api::of(&loaded).is_ok()),
            Err(e @ LibraryError::Missing { .. }) => eprintln!("SKIPPED: {e}"),
            Err(e) => panic!("{e}"),
        }
    }

    /// Descriptions need neither a GPU nor the driver: the library checks types and sizes of attributes.
    #[test]
    fn the_library_accepts_every_description() {
        let loaded = match library((u32::MAX, 0)).load() {
            Ok(loaded) => loaded,
            Err(e) => return eprintln!("SKIPPED: {e}"),
        };
        let (api, problems) = (Api::of(&loaded).unwrap(), RefCell::default());
        let library = CublasLt { api, version: 0, handle: null_mut(), problems };
        let operand = |dtype, row_stride, transposed| Operand {
            dtype,
            row_stride,
            batch_stride: 1 << 12,
            transposed,
            alignment_bytes: 16,
        };
        let kinds = [
            Kind::None,
            Kind::Bias,
            Kind::Gelu { bias: false, before: false },
            Kind::Gelu { bias: false, before: true },
            Kind::Gelu { bias: true, before: false },
            Kind::Gelu { bias: true, before: true },
            Kind::GeluGrad { rows: false },
            Kind::GeluGrad { rows: true },
            Kind::SumA,
            Kind::SumB,
        ];
        let of = |inputs, output, batch, epilogue| GemmProblem {
            m: 32,
            n: 64,
            k: 16,
            batch,
            a: operand(inputs, 32, true),
            b: operand(inputs, 64, false),
            d: operand(output, 64, false),
            epilogue,
        };
        for epilogue in kinds {
            for (inputs, output) in [
                (DType::BF16, DType::BF16),
                (DType::F16, DType::F32),
                (DType::F64, DType::F64),
                (DType::F8E4M3, DType::BF16),
            ] {
                for batch in [1, 3] {
                    let problem = of(inputs, output, batch, epilogue);
                    let described = library.describe(&problem).unwrap_or_else(|e| panic!("{e}"));
                    let set = library.set_addresses(&described, [256; 2], [256; 2]);
                    set.unwrap_or_else(|e| panic!("{problem}: {e}"));
                    library.prefer(&problem, 1 << 20).unwrap_or_else(|e| panic!("{e}"));
                }
            }
        }
        // A wrong size is refused, so the checks above are effective.
        let described = library.describe(&of(DType::F32, DType::F32, 1, Kind::None)).unwrap();
        let attribute = Attribute::CUBLASLT_MATMUL_DESC_TRANSA;
        assert!(library.set(described.description, attribute, 1_u64).is_err());
    }
}
