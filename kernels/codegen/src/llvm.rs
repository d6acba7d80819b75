//! LLVM's C API for target machines: compiles a lowered MLIR module to object code or assembly.
//!
//! `mlir-sys` binds only the parts of LLVM that MLIR's headers include; the few functions for targets and pass pipelines are declared
//! here. Their symbols are in the LLVM libraries that it links.

use crate::error::CodegenError;
use crate::mlir::Mlir;
use melior::ir::Module;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::Once;

type Raw = *mut c_void;

unsafe extern "C" {
    fn mlirTranslateModuleToLLVMIR(op: mlir_sys::MlirOperation, context: Raw) -> Raw;
    fn LLVMContextCreate() -> Raw;
    fn LLVMContextDispose(context: Raw);
    fn LLVMDisposeModule(module: Raw);
    fn LLVMDisposeMessage(message: *mut c_char);
    fn LLVMGetHostCPUName() -> *mut c_char;
    fn LLVMGetHostCPUFeatures() -> *mut c_char;
    fn LLVMGetDefaultTargetTriple() -> *mut c_char;
    fn LLVMGetTargetFromTriple(t: *const c_char, out: *mut Raw, err: *mut *mut c_char) -> c_int;
    fn LLVMCreateTargetMachine(
        target: Raw,
        triple: *const c_char,
        cpu: *const c_char,
        features: *const c_char,
        level: c_int,
        relocation: c_int,
        code_model: c_int,
    ) -> Raw;
    fn LLVMDisposeTargetMachine(machine: Raw);
    fn LLVMCreateTargetDataLayout(machine: Raw) -> Raw;
    fn LLVMDisposeTargetData(layout: Raw);
    fn LLVMSetModuleDataLayout(module: Raw, layout: Raw);
    fn LLVMSetTarget(module: Raw, triple: *const c_char);
    fn LLVMGetFirstFunction(module: Raw) -> Raw;
    fn LLVMGetNextFunction(function: Raw) -> Raw;
    fn LLVMIsDeclaration(function: Raw) -> c_int;
    fn LLVMAddTargetDependentFunctionAttr(f: Raw, name: *const c_char, value: *const c_char);
    fn LLVMCreatePassBuilderOptions() -> Raw;
    fn LLVMDisposePassBuilderOptions(options: Raw);
    fn LLVMRunPasses(module: Raw, passes: *const c_char, machine: Raw, options: Raw) -> Raw;
    fn LLVMGetErrorMessage(error: Raw) -> *mut c_char;
    fn LLVMDisposeErrorMessage(message: *mut c_char);
    fn LLVMTargetMachineEmitToMemoryBuffer(
        machine: Raw,
        module: Raw,
        kind: c_int,
        error: *mut *mut c_char,
        out: *mut Raw,
    ) -> c_int;
    fn LLVMGetBufferStart(buffer: Raw) -> *const c_char;
    fn LLVMGetBufferSize(buffer: Raw) -> usize;
    fn LLVMDisposeMemoryBuffer(buffer: Raw);
    fn LLVMInitializeNVPTXTargetInfo();
    fn LLVMInitializeNVPTXTarget();
    fn LLVMInitializeNVPTXTargetMC();
    fn LLVMInitializeNVPTXAsmPrinter();
    #[cfg(target_arch = "x86_64")]
    fn LLVMInitializeX86TargetInfo();
    #[cfg(target_arch = "x86_64")]
    fn LLVMInitializeX86Target();
    #[cfg(target_arch = "x86_64")]
    fn LLVMInitializeX86TargetMC();
    #[cfg(target_arch = "x86_64")]
    fn LLVMInitializeX86AsmPrinter();
    #[cfg(target_arch = "aarch64")]
    fn LLVMInitializeAArch64TargetInfo();
    #[cfg(target_arch = "aarch64")]
    fn LLVMInitializeAArch64Target();
    #[cfg(target_arch = "aarch64")]
    fn LLVMInitializeAArch64TargetMC();
    #[cfg(target_arch = "aarch64")]
    fn LLVMInitializeAArch64AsmPrinter();
}

/// `LLVMCodeGenLevelAggressive`.
const AGGRESSIVE: c_int = 3;
/// `LLVMRelocPIC`.
const POSITION_INDEPENDENT: c_int = 2;

/// What a target machine writes; the values are those of `LLVMCodeGenFileType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileType {
    Assembly = 0,
    Object = 1,
}

/// What to generate code for.
#[derive(Debug)]
pub(crate) struct Target {
    /// LLVM triple.
    pub(crate) triple: String,
    /// LLVM's name of the CPU or chip.
    pub(crate) cpu: String,
    /// Features, `+` or `-` each, separated by commas.
    pub(crate) features: String,
}

/// LLVM's name of this machine's CPU, its feature string and this machine's triple.
pub(crate) fn host() -> (String, String, String) {
    // SAFETY: each call returns an owned, terminated string that `take` frees.
    unsafe {
        (
            take(LLVMGetHostCPUName()),
            take(LLVMGetHostCPUFeatures()),
            take(LLVMGetDefaultTargetTriple()),
        )
    }
}

/// Translates the module, optimizes it and generates code.
///
/// # Errors
/// [`CodegenError::Target`] if LLVM does not know the target, [`CodegenError::Mlir`] if the module is
/// not fully lowered, [`CodegenError::Llvm`] otherwise.
pub(crate) fn emit(
    mlir: &Mlir,
    module: &Module<'_>,
    target: &Target,
    file_type: FileType,
) -> Result<Vec<u8>, CodegenError> {
    initialize();
    let triple = c_string(&target.triple);
    let (cpu, features) = (c_string(&target.cpu), c_string(&target.features));
    // SAFETY: every handle is owned by a guard below and used only while the guard lives; strings
    // outlive the calls they are passed to.
    unsafe {
        let machine =
            Owned::new(machine(target, &triple, &cpu, &features)?, LLVMDisposeTargetMachine);
        let context = Owned::new(LLVMContextCreate(), LLVMContextDispose);
        let translated = mlirTranslateModuleToLLVMIR(module.as_operation().to_raw(), context.raw);
        if translated.is_null() {
            return Err(mlir.error("translating it to LLVM"));
        }
        let module = Owned::new(translated, LLVMDisposeModule);
        let layout = Owned::new(LLVMCreateTargetDataLayout(machine.raw), LLVMDisposeTargetData);
        LLVMSetTarget(module.raw, triple.as_ptr());
        LLVMSetModuleDataLayout(module.raw, layout.raw);
        let mut function = LLVMGetFirstFunction(module.raw);
        while !function.is_null() {
            if LLVMIsDeclaration(function) == 0 {
                for (name, value) in [
                    (c"target-cpu", cpu.as_c_str()),
                    (c"target-features", features.as_c_str()),
                    (c"prefer-vector-width", c"512"),
                ] {
                    LLVMAddTargetDependentFunctionAttr(function, name.as_ptr(), value.as_ptr());
                }
            }
            function = LLVMGetNextFunction(function);
        }
        let options = Owned::new(LLVMCreatePassBuilderOptions(), LLVMDisposePassBuilderOptions);
        let error = LLVMRunPasses(module.raw, c"default<O2>".as_ptr(), machine.raw, options.raw);
        if !error.is_null() {
            let message = LLVMGetErrorMessage(error);
            let text = CStr::from_ptr(message).to_string_lossy().into_owned();
            LLVMDisposeErrorMessage(message);
            return Err(failed("optimizing", text));
        }
        let (mut message, mut buffer) = (ptr::null_mut(), ptr::null_mut());
        let status = LLVMTargetMachineEmitToMemoryBuffer(
            machine.raw,
            module.raw,
            file_type as c_int,
            &mut message,
            &mut buffer,
        );
        if status != 0 {
            return Err(failed("generating code", take(message)));
        }
        let buffer = Owned::new(buffer, LLVMDisposeMemoryBuffer);
        let (start, size) = (LLVMGetBufferStart(buffer.raw), LLVMGetBufferSize(buffer.raw));
        Ok(std::slice::from_raw_parts(start.cast::<u8>(), size).to_vec())
    }
}

/// A handle freed on drop.
struct Owned {
    raw: Raw,
    free: unsafe extern "C" fn(Raw),
}

impl Owned {
    fn new(raw: Raw, free: unsafe extern "C" fn(Raw)) -> Self {
        Owned { raw, free }
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: `raw` is owned by this guard and `free` is its destructor.
        unsafe { (self.free)(self.raw) }
    }
}

/// # Safety
/// The strings must be those of `target`.
unsafe fn machine(
    target: &Target,
    triple: &CStr,
    cpu: &CStr,
    features: &CStr,
) -> Result<Raw, CodegenError> {
    let (mut found, mut message) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the out pointers are live, the strings terminated.
    unsafe {
        if LLVMGetTargetFromTriple(triple.as_ptr(), &mut found, &mut message) != 0 {
            return Err(CodegenError::Target { target: target.cpu.clone(), why: take(message) });
        }
        let machine = LLVMCreateTargetMachine(
            found,
            triple.as_ptr(),
            cpu.as_ptr(),
            features.as_ptr(),
            AGGRESSIVE,
            POSITION_INDEPENDENT,
            0,
        );
        if machine.is_null() {
            let why = "LLVM has no such target machine".into();
            return Err(CodegenError::Target { target: target.cpu.clone(), why });
        }
        Ok(machine)
    }
}

/// # Safety
/// `message` must be null or an owned, terminated string of LLVM's.
unsafe fn take(message: *mut c_char) -> String {
    if message.is_null() {
        return String::new();
    }
    // SAFETY: as the caller promises.
    unsafe {
        let text = CStr::from_ptr(message).to_string_lossy().into_owned();
        LLVMDisposeMessage(message);
        text
    }
}

/// A terminated copy; text after an inner NUL is cut, which no target string has.
fn c_string(s: &str) -> CString {
    CString::new(s.split('\0').next().unwrap_or_default())
        .expect("invariant: the text before the first NUL has none")
}

fn failed(stage: &'static str, message: String) -> CodegenError {
    CodegenError::Llvm { stage, message }
}

fn initialize() {
    static ONCE: Once = Once::new();
    // SAFETY: registration of targets is global and runs once.
    ONCE.call_once(|| unsafe {
        #[cfg(target_arch = "x86_64")]
        {
            LLVMInitializeX86TargetInfo();
            LLVMInitializeX86Target();
            LLVMInitializeX86TargetMC();
            LLVMInitializeX86AsmPrinter();
        }
        #[cfg(target_arch = "aarch64")]
        {
            LLVMInitializeAArch64TargetInfo();
            LLVMInitializeAArch64Target();
            LLVMInitializeAArch64TargetMC();
            LLVMInitializeAArch64AsmPrinter();
        }
        LLVMInitializeNVPTXTargetInfo();
        LLVMInitializeNVPTXTarget();
        LLVMInitializeNVPTXTargetMC();
        LLVMInitializeNVPTXAsmPrinter();
    });
}
