//! Runs that start from the parameters of a file.

use crate::support::{Planned, file, plan, plan_to_evaluate, write_f32};
use frit::export::{Options, Trained, onnx};
use frit_ir::{DType, Tensor, TensorType};
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::eval::{self, evaluate};
use frit_runtime::run::{RunOptions, RunReport, run};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

const DATA: &str = "tests/models/mlp/data.safetensors";

fn planned(settings: &[&str]) -> Planned {
    plan("tests/models/mlp/model.onnx", 4, settings)
}

fn options(steps: usize, weights: Option<PathBuf>, save: &Path) -> RunOptions {
    RunOptions {
        steps,
        data: file(DATA).into(),
        weights: weights.into_iter().collect(),
        save: Some(save.into()),
        threads: Some(1),
        ..RunOptions::default()
    }
}

fn train(planned: &Planned, options: &RunOptions) -> RunReport {
    run(&planned.path(), options).unwrap_or_else(|e| panic!("{e}"))
}

/// Name, shape and elements of every tensor of a file of f32.
fn tensors(path: &Path) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let bytes = std::fs::read(path).expect("tensors");
    let file = SafeTensors::deserialize(&bytes).expect("tensors");
    let values = |data: &[u8]| {
        data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<f32>>()
    };
    let mut all: Vec<_> = file
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, view.shape().to_vec(), values(view.data())))
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// The same tensors in another float type.
fn narrowed(path: &Path, to: &Path, dtype: DType, stored: Dtype) {
    let all = tensors(path);
    let bytes = all.iter().map(|(_, shape, values)| {
        let values = values.iter().map(|x| f64::from(*x)).collect();
        Tensor::floats(dtype, shape.clone(), values).to_bytes()
    });
    let bytes: Vec<Vec<u8>> = bytes.collect();
    let view =
        |shape: &Vec<usize>, bytes| TensorView::new(stored, shape.clone(), bytes).expect("fits");
    let views = all.iter().zip(&bytes).map(|((name, shape, _), b)| (name, view(shape, b)));
    safetensors::serialize_to_file(views, None, to).expect("written");
}

#[test]
fn every_strategy_starts_from_the_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    train(&planned(&["optimizer.lr=0.1"]), &options(2, None, &at("trained")));
    let expected = tensors(&at("trained"));
    for settings in [
        &[][..],
        &["sharding.ranks=2", "precision.compute=bf16"],
        &["sharding.ranks=3", "sharding.strategy=no_shard", "run.accumulation=2"],
        &["sharding.ranks=4", "sharding.strategy=hybrid_shard", "sharding.shard_group=2"],
        &["sharding.ranks=2", "memory.offload=parameters", "optimizer.ema=0.9"],
    ] {
        let plan = planned(settings);
        train(&plan, &options(0, None, &at("plan")));
        assert!(tensors(&at("plan")) != expected, "{settings:?}");
        train(&plan, &options(0, Some(at("trained")), &at("started")));
        assert!(tensors(&at("started")) == expected, "{settings:?}");
    }
    for (name, dtype, stored) in
        [("f16", DType::F16, Dtype::F16), ("bf16", DType::BF16, Dtype::BF16)]
    {
        narrowed(&at("trained"), &at(name), dtype, stored);
        train(&planned(&["sharding.ranks=2"]), &options(0, Some(at(name)), &at("started")));
        for ((name, shape, wide), (_, _, found)) in expected.iter().zip(tensors(&at("started"))) {
            let ty = TensorType::new(dtype, shape.clone());
            let wide = wide.iter().map(|x| f64::from(*x)).collect();
            let rounded = Tensor::floats(ty.dtype, ty.shape, wide).to_f64s();
            assert!(rounded.iter().zip(&found).all(|(a, b)| *a == f64::from(*b)), "{name}");
        }
    }
}

#[test]
fn a_file_that_does_not_fit_is_one_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    let plan = planned(&[]);
    train(&plan, &options(0, None, &at("plan")));
    let mut all = tensors(&at("plan"));
    let (missing, other) = (all.remove(0).0, all[0].0.clone());
    all[0].1.push(1);
    all.push(("stray".into(), vec![1], vec![0.0]));
    let borrowed: Vec<_> = all.iter().map(|(n, s, v)| (n.as_str(), s.clone(), v.clone())).collect();
    write_f32(&at("wrong"), &borrowed);
    let error = run(&plan.path(), &options(1, Some(at("wrong")), &at("saved")));
    let text = error.expect_err("it does not fit").to_string();
    for part in [
        format!("1 missing: `{missing}`"),
        format!("1 of another type: `{other}`, F32"),
        "1 unknown to the plan: `stray`".into(),
    ] {
        assert!(text.contains(&part), "{part} in {text}");
    }
    assert!(!at("saved").exists());
}

#[test]
fn nothing_is_written_over_the_plan() {
    let plan = planned(&[]);
    for name in ["plan.json", "source/train.toml"] {
        let file = plan.path().join(name);
        let before = std::fs::read(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let refused = run(&plan.path(), &options(1, None, &file)).expect_err("the plan is kept");
        assert!(refused.to_string().contains("is also the file of the plan"), "{refused}");
        assert!(std::fs::read(&file).expect("it is there") == before, "{name}");
    }
}

#[test]
fn files_of_something_else_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    let plan = plan_to_evaluate("tests/models/mlp/model.onnx", 4, &[]);
    write_f32(&at("others"), &[]);
    let refused = run(&plan.path(), &options(1, Some(at("others")), &at("saved")));
    let refused = refused.expect_err("no parameter is there").to_string();
    assert!(refused.contains("missing"), "{refused}");
    // An evaluation reads the parameters of its training, and no others.
    train(&plan, &options(0, None, &at("own")));
    let mut all = tensors(&at("own"));
    let evaluate = |weights: &str| {
        let options = eval::Options {
            plan: plan.path(),
            weights: vec![at(weights)],
            data: vec![file(DATA)],
            ..Default::default()
        };
        evaluate(&options).map(|_| ()).map_err(|e| e.to_string())
    };
    assert_eq!(evaluate("own"), Ok(()));
    all.push(("layer.lora_A".into(), vec![2, 1], vec![1.0, 2.0]));
    let borrowed: Vec<_> = all.iter().map(|(n, s, v)| (n.as_str(), s.clone(), v.clone())).collect();
    write_f32(&at("more"), &borrowed);
    let refused = evaluate("more").expect_err("an adapter of another plan");
    assert!(refused.contains("`layer.lora_A`"), "{refused}");
    for (weights, part) in
        [("more", "`layer.lora_A`"), ("others", "holds no parameter of the plan")]
    {
        let trained =
            Trained::of_plan(&plan.path(), &at(weights)).unwrap_or_else(|e| panic!("{e}"));
        let refused = onnx(&trained, &Options::default(), &at("model.onnx"));
        let refused = refused.expect_err("it does not fit").to_string();
        assert!(refused.contains(part), "{refused}");
    }
}

#[test]
fn what_can_not_train_does_not_run() {
    let dir = tempfile::tempdir().expect("a directory");
    let without_loss = planned(&["loss.kind=none"]);
    let refused = run(&without_loss.path(), &options(1, None, &dir.path().join("saved")));
    let refused = refused.expect_err("nothing trains").to_string();
    assert!(refused.contains("the plan only evaluates"), "{refused}");
    // A plan is replaced, not what lies beside it.
    std::fs::write(without_loss.path().join("notes.txt"), "notes").expect("written");
    let refused = frit_runtime::plan_dir::check_free(&without_loss.path());
    let refused = refused.expect_err("there are notes").to_string();
    assert!(refused.contains("other files: notes.txt"), "{refused}");
    let plan = planned(&[]);
    assert!(frit_runtime::plan_dir::check_free(&plan.path()).is_ok());
}

#[test]
fn a_checkpoint_comes_before_the_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    let plan = planned(&["sharding.ranks=2"]);
    train(&planned(&["optimizer.lr=0.1"]), &options(2, None, &at("trained")));
    let go = |steps, weights| {
        let checkpoint =
            CheckpointOptions { dir: at("checkpoints"), every: None, resume: true, keep: None };
        let checkpoint = Some(checkpoint);
        train(&plan, &RunOptions { checkpoint, ..options(steps, weights, &at("saved")) })
    };
    let expected = train(&plan, &options(4, Some(at("trained")), &at("whole")));
    go(2, Some(at("trained")));
    let losses = go(4, Some(at("nothing is there"))).losses;
    assert_eq!(losses, expected.losses[2..]);
    assert!(tensors(&at("saved")) == tensors(&at("whole")));
}

/// Writes the tensors of a file under other names.
fn rename(from: &Path, to: &Path, name: impl Fn(&str) -> String) {
    let all = tensors(from);
    let named: Vec<_> =
        all.into_iter().map(|(n, shape, values)| (name(&n), shape, values)).collect();
    let borrowed: Vec<_> = named
        .iter()
        .map(|(n, shape, values)| (n.as_str(), shape.clone(), values.clone()))
        .collect();
    write_f32(to, &borrowed);
}

/// What a file is called, how it names a tensor of the plan, and what the notes say about it.
type Way<'w> = (&'w str, &'w dyn Fn(&str) -> String, &'w [&'w str]);

#[test]
fn weights_of_other_libraries_are_found_by_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    let gpt2 = |settings: &[&str]| plan_to_evaluate("tests/models/gpt2/model.onnx", 8, settings);
    let data = || file("tests/models/gpt2/data.safetensors");
    let options = |steps, weights: Option<&Path>, save: &str| RunOptions {
        data: data().into(),
        ..options(steps, weights.map(Into::into), &at(save))
    };
    train(&gpt2(&["optimizer.lr=0.01"]), &options(2, None, "trained"));
    let plain = |name: &str| name.trim_start_matches("net.").to_owned();
    let table = |name: &str| plain(name).replace("lm_head", "transformer.wte");
    let base = |name: &str| table(name).trim_start_matches("transformer.").to_owned();
    let parallel = |name: &str| format!("module._orig_mod.{}", table(name));
    let ways: [Way<'_>; 4] = [
        ("plain", &plain, &["`net.`"]),
        ("table", &table, &["`net.`", "tied `transformer.wte.weight`"]),
        ("base", &base, &["`net.transformer.`", "tied `wte.weight`"]),
        ("parallel", &parallel, &["`module._orig_mod.`", "tied"]),
    ];
    let settings: [&[&str]; 4] = [
        &[],
        &["sharding.ranks=2", "sharding.strategy=no_shard", "precision.compute=bf16"],
        &["sharding.ranks=4", "memory.offload=parameters"],
        &[
            "sharding.ranks=2",
            "run.accumulation=2",
            "params.frozen=[\"**.wte.*\", \"**.lm_head.*\"]",
        ],
    ];
    for ((way, name, notes), settings) in ways.into_iter().zip(settings) {
        rename(&at("trained"), &at(way), name);
        let planned = gpt2(settings);
        let own = train(&planned, &options(2, Some(&at("trained")), "own"));
        let other = train(&planned, &options(2, Some(&at(way)), "other"));
        assert_eq!((other.losses, own.warnings), (own.losses, vec![]), "{way}");
        assert!(tensors(&at("own")) == tensors(&at("other")), "{way}");
        let said = other.warnings.join("\n");
        assert!(notes.iter().all(|note| said.contains(note)), "{way}: {said}");
        let evaluated = |weights: &str| {
            let options = eval::Options {
                plan: planned.path(),
                data: vec![data()],
                weights: vec![at(weights)],
                ..eval::Options::default()
            };
            evaluate(&options).unwrap_or_else(|e| panic!("{e}")).expect("a report")
        };
        assert_eq!(evaluated(way).loss, evaluated("trained").loss, "{way}");
        assert!(notes.iter().all(|n| evaluated(way).notes.join("\n").contains(n)), "{way}");
    }

    // Shards of a model share one prefix; the second alone could be of either layer.
    let all = tensors(&at("base"));
    let (second, first): (Vec<_>, Vec<_>) = all.iter().partition(|t| t.0.ends_with("ln_1.weight"));
    let folder = at("folder");
    std::fs::create_dir(&folder).expect("a folder");
    let mut map = serde_json::Map::new();
    for (shard, part) in [("1.safetensors", first), ("2.safetensors", second)] {
        let part: Vec<_> = part.iter().map(|t| (t.0.as_str(), t.1.clone(), t.2.clone())).collect();
        map.extend(part.iter().map(|(name, _, _)| (name.to_string(), shard.into())));
        write_f32(&folder.join(shard), &part);
    }
    let index = serde_json::json!({ "weight_map": map }).to_string();
    std::fs::write(folder.join("model.safetensors.index.json"), index).expect("written");
    let planned = gpt2(&["sharding.ranks=2"]);
    train(&planned, &options(0, Some(&folder), "sharded"));
    assert!(tensors(&at("sharded")) == tensors(&at("trained")));

    // Files of transformers have buffers beside the parameters.
    let mask = |high: f32| (0..64).map(|i| if i % 8 <= i / 8 { 1.0 } else { high }).collect();
    let with = |more: &[(&str, Vec<usize>, Vec<f32>)]| {
        let mut all: Vec<_> =
            all.iter().map(|t| (t.0.as_str(), t.1.clone(), t.2.clone())).collect();
        all.extend_from_slice(more);
        write_f32(&at("buffers"), &all);
    };
    let buffers = [
        ("h.0.attn.bias", vec![1, 1, 8, 8], mask(0.0)),
        ("h.0.attn.masked_bias", vec![], vec![-1e4]),
        ("h.1.attn.bias", vec![1, 1, 8, 8], mask(0.0)),
    ];
    with(&buffers);
    let said = train(&planned, &options(0, Some(&at("buffers")), "buffered")).warnings.join("\n");
    assert!(said.contains("3 buffers are not read, such as `h.0.attn.bias`"), "{said}");
    assert!(tensors(&at("buffered")) == tensors(&at("trained")));
    with(&[("h.0.attn.bias", vec![1, 1, 8, 8], mask(2.0))]);
    let both =
        RunOptions { weights: vec![at("trained"), at("buffers")], ..options(1, None, "saved") };
    let text = run(&planned.path(), &both).expect_err("no mask").to_string();
    let part = format!("1 unknown to the plan: `h.0.attn.bias` of {}", at("buffers").display());
    assert!(text.contains(&part), "{text}");

    // Half a model under another prefix is still half a model, and another one is none.
    let some: Vec<_> = all.iter().filter(|t| !t.0.starts_with("h.1.mlp")).collect();
    let some: Vec<_> = some.iter().map(|t| (t.0.as_str(), t.1.clone(), t.2.clone())).collect();
    write_f32(&at("half"), &some);
    rename(&at("trained"), &at("another"), |name| name.replace(".attn.", ".attention."));
    for (weights, part) in
        [("half", "4 missing: `net.transformer.h.1.mlp"), ("another", "8 missing")]
    {
        let refused = run(&planned.path(), &options(1, Some(&at(weights)), "saved"));
        let text = refused.expect_err("it does not fit").to_string();
        assert!(text.contains(part), "{text}");
    }
    assert!(!at("saved").exists());
}
