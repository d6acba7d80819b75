//! Plans for CUDA: every body has code, generated or by a recipe.

use crate::support::{compile_at, file};
use frit_ir::plan::KernelKind;
use frit_runtime::device::cuda::recipe::Recipe;

fn has_recipes(model: &str, batch: usize, settings: &[&str]) {
    let model = format!("tests/models/{model}/model.onnx");
    let settings = [&["target.device=cuda"], settings].concat();
    let compiled = compile_at(&file(&model), batch, &settings);
    let mut recipes = 0;
    for kernel in &compiled.plan.kernels {
        assert_ne!(kernel.kind, KernelKind::Interpreted, "{model}:\n{}", kernel.body);
        if kernel.kind == KernelKind::Library {
            assert!(Recipe::of(&kernel.body).is_some(), "{model}:\n{}", kernel.body);
            recipes += 1;
        }
    }
    assert!(recipes > 0, "{model}");
}

#[test]
fn language_models_have_a_recipe_for_every_library_kernel() {
    for model in ["mlp", "gpt2", "llama", "bert", "t5", "bloom", "opt", "moe_dispatch", "lstm"] {
        has_recipes(model, 4, &["precision.compute=bf16"]);
    }
}

#[test]
fn vision_models_have_a_recipe_for_every_library_kernel() {
    for model in ["vit", "resnet"] {
        has_recipes(model, 4, &["precision.compute=fp16"]);
    }
    has_recipes("unet", 4, &["precision.compute=fp32", "loss.kind=mse"]);
}
