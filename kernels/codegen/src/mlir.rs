//! Parses MLIR text and lowers it to the `llvm` and `nvvm` dialects.
//!
//! Only the dialects and passes in use are registered, to keep the binary small. Host and device kernels share one pipeline; device
//! kernels use `nvvm` operations for thread ids, shuffles and barriers.

use crate::error::CodegenError;
use melior::Context;
use melior::dialect::{DialectHandle, DialectRegistry};
use melior::ir::operation::{OperationLike, OperationMutLike};
use melior::ir::{Attribute, BlockLike, Module};
use melior::pass::PassManager;
use melior::utility::{parse_pass_pipeline, register_all_llvm_translations};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Once;

/// From `scf`, `vector`, `math`, `memref`, `arith`, `func` to `llvm`. Bare pointers need static shapes.
const PIPELINE: &str = "builtin.module(\
    canonicalize,cse,convert-scf-to-cf,\
    convert-vector-to-llvm{reassociate-fp-reductions=1},\
    convert-math-to-llvm,finalize-memref-to-llvm,convert-arith-to-llvm,convert-index-to-llvm,\
    convert-func-to-llvm{use-bare-ptr-memref-call-conv=1},convert-cf-to-llvm,\
    reconcile-unrealized-casts)";

/// An MLIR context with its collected diagnostics. Contexts share nothing, so each thread has its own.
pub(crate) struct Mlir {
    context: Context,
    diagnostics: Rc<RefCell<Vec<String>>>,
}

impl Mlir {
    /// A context with the dialects that kernels use.
    pub(crate) fn new() -> Self {
        register_passes();
        let registry = DialectRegistry::new();
        for handle in [
            DialectHandle::arith(),
            DialectHandle::cf(),
            DialectHandle::func(),
            DialectHandle::llvm(),
            DialectHandle::memref(),
            DialectHandle::scf(),
        ] {
            handle.insert_dialect(&registry);
        }
        // SAFETY: the handles are static and the registry is live.
        unsafe {
            for handle in [
                mlir_sys::mlirGetDialectHandle__math__(),
                mlir_sys::mlirGetDialectHandle__nvvm__(),
                mlir_sys::mlirGetDialectHandle__vector__(),
            ] {
                mlir_sys::mlirDialectHandleInsertDialect(handle, registry.to_raw());
            }
        }
        let context = Context::new_with_registry(&registry, false);
        register_all_llvm_translations(&context);
        context.load_all_available_dialects();
        let diagnostics = Rc::new(RefCell::new(Vec::new()));
        let sink = diagnostics.clone();
        context.attach_diagnostic_handler(move |diagnostic| {
            sink.borrow_mut().push(format!("{}: {diagnostic}", diagnostic.location()));
            true
        });
        Mlir { context, diagnostics }
    }

    /// Parses `source` and lowers it to the `llvm` dialect.
    ///
    /// # Errors
    /// [`CodegenError::Mlir`] with MLIR's diagnostics.
    pub(crate) fn lower(&self, source: &str) -> Result<Module<'_>, CodegenError> {
        self.run(source, PIPELINE)
    }

    /// Marks the functions of a lowered module as CUDA kernels, each for blocks of so many threads.
    ///
    /// Only possible after lowering: before it, no operation may carry these attributes.
    pub(crate) fn mark_kernels(&self, module: &Module<'_>, blocks: &[(String, u32)]) {
        let parse = |text: &str| {
            Attribute::parse(&self.context, text).expect("invariant: the attribute is well-formed")
        };
        let mut next = module.body().first_operation_mut();
        while let Some(mut op) = next {
            next = op.next_in_block_mut();
            if op.name().as_string_ref().as_str() != Ok("llvm.func") {
                continue;
            }
            let name = op.attribute("sym_name").map(|a| a.to_string()).unwrap_or_default();
            let threads = blocks.iter().find(|(symbol, _)| name.trim_matches('"') == symbol);
            if let Some((_, threads)) = threads {
                op.set_attribute("nvvm.kernel", Attribute::unit(&self.context));
                op.set_attribute("nvvm.maxntid", parse(&format!("array<i32: {threads}, 1, 1>")));
            }
        }
    }

    fn run(&self, source: &str, pipeline: &str) -> Result<Module<'_>, CodegenError> {
        self.diagnostics.borrow_mut().clear();
        let mut module =
            Module::parse(&self.context, source).ok_or_else(|| self.error("parsing it"))?;
        let manager = PassManager::new(&self.context);
        // The verifier costs a third of the time; parsing has already verified the text once.
        manager.enable_verifier(cfg!(debug_assertions));
        parse_pass_pipeline(manager.as_operation_pass_manager(), pipeline).map_err(|e| {
            CodegenError::Mlir { stage: "reading the pipeline", diagnostics: e.to_string() }
        })?;
        manager.run(&mut module).map_err(|_| self.error("lowering it"))?;
        Ok(module)
    }

    /// An error with the diagnostics of what was done last.
    pub(crate) fn error(&self, stage: &'static str) -> CodegenError {
        CodegenError::Mlir { stage, diagnostics: self.diagnostics.borrow().join("\n") }
    }
}

fn register_passes() {
    static ONCE: Once = Once::new();
    // SAFETY: registration is global and runs once.
    ONCE.call_once(|| unsafe {
        mlir_sys::mlirRegisterTransformsCanonicalizer();
        mlir_sys::mlirRegisterTransformsCSE();
        mlir_sys::mlirRegisterConversionSCFToControlFlowPass();
        mlir_sys::mlirRegisterConversionConvertVectorToLLVMPass();
        mlir_sys::mlirRegisterConversionConvertMathToLLVMPass();
        mlir_sys::mlirRegisterConversionFinalizeMemRefToLLVMConversionPass();
        mlir_sys::mlirRegisterConversionArithToLLVMConversionPass();
        mlir_sys::mlirRegisterConversionConvertIndexToLLVMPass();
        mlir_sys::mlirRegisterConversionConvertFuncToLLVMPass();
        mlir_sys::mlirRegisterConversionConvertControlFlowToLLVMPass();
        mlir_sys::mlirRegisterConversionReconcileUnrealizedCastsPass();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parse_error_carries_mlirs_own_words() {
        let error = Mlir::new().lower("func.func @f() { %x = arith.nonsense }").unwrap_err();
        let CodegenError::Mlir { stage, diagnostics } = error else { panic!("{error}") };
        assert_eq!(stage, "parsing it");
        assert!(diagnostics.contains("arith.nonsense"), "{diagnostics}");
    }

    #[test]
    fn errors_do_not_stick_to_the_context() {
        let mlir = Mlir::new();
        mlir.lower("nonsense").unwrap_err();
        mlir.lower("func.func @f(%x: memref<4xf32>) { return }").unwrap();
        let error = mlir.lower("other_nonsense").unwrap_err().to_string();
        assert!(error.contains("other_nonsense") && !error.contains("'nonsense'"), "{error}");
    }
}
