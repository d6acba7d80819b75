//! Plans for CUDA: every body has code, generated or by a recipe.

use crate::support::file;
use frit::config::Config;
use frit::driver::{Request, compile};
use frit_ir::plan::KernelKind;
use frit_runtime::device::cuda::recipe::Recipe;

fn has_recipes(model: &str, batch: usize, settings: &[&str]) {
    let mut all = vec!["target.device=cuda".to_string()];
    all.extend(settings.iter().map(|s| s.to_string()));
    let config = Config::load(None, &all).unwrap_or_else(|e| panic!("{e}"));
    let request = Request {
        model: file(&format!("tests/models/{model}/model.onnx")),
        binds: [("batch".to_string(), batch)].into(),
        ..Request::default()
    };
    let compiled = compile(&request, &config, &mut ()).unwrap_or_else(|e| panic!("{model}: {e}"));
    let mut recipes = 0;
    for kernel in &compiled.expect("a plan").plan.kernels {
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
