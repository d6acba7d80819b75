//! The page of `frit report`: what it draws of plans and runs, and what it refuses.

use crate::pairs::{Row, rows};
use crate::simulate::frit;
use crate::support::{Planned, file, plan, plan_to_evaluate, plan_to_evaluate_at};
use clap::Parser;
use frit::certificate::Checked;
use frit::commands::{Cli, execute, verify};
use frit::plan_dir;
use frit_ir::plan::{Plan, layout, seal};
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::run::{RunOptions, run};
use frit_runtime::validation::ValidationOptions;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The page of a plan, with these arguments.
pub(crate) fn page(planned: &Planned, args: &[&Path]) -> Result<String, String> {
    let output = planned.dir.path().join("report.html");
    let path = planned.path();
    let mut words = vec!["frit".as_ref(), "report".as_ref(), path.as_os_str()];
    words.extend(args.iter().map(|a| a.as_os_str()));
    words.extend(["-o".as_ref(), output.as_os_str()]);
    let cli = Cli::try_parse_from(words).map_err(|e| e.to_string())?;
    let said = execute(&cli).map_err(|report| format!("{report:?} {report}"))?;
    assert_eq!(said.trim_end(), output.to_str().expect("a path"));
    Ok(std::fs::read_to_string(output).expect("the page"))
}

/// Trains with metrics, a trace, and validations; the paths of both files.
pub(crate) fn trained(planned: &Planned, model: &str, steps: usize) -> (PathBuf, PathBuf) {
    let dir = planned.dir.path();
    let (metrics, trace) = (dir.join("metrics.jsonl"), dir.join("trace.json"));
    let data = file(&format!("tests/models/{model}/data.safetensors"));
    let options = RunOptions {
        steps,
        data: data.clone().into(),
        metrics: Some(metrics.clone()),
        trace: Some(trace.clone()),
        validation: Some(ValidationOptions { data: data.into(), every: Some(2) }),
        checkpoint: Some(CheckpointOptions {
            dir: dir.join("ckpt"),
            every: Some(2),
            resume: true,
            keep: None,
        }),
        threads: Some(1),
        ..RunOptions::default()
    };
    run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
    (metrics, trace)
}

/// The numbers of points of the paths of a chart, by the class of the path.
fn points(page: &str, title: &str) -> Vec<(String, usize)> {
    let figure = page.split("<figure").find(|f| f.contains(&format!("<figcaption>{title} ")));
    let figure = figure.unwrap_or_else(|| panic!("no chart `{title}`"));
    let paths = figure.split("<path class='").skip(1).filter(|p| p.contains("data-run"));
    let points = |path: &str| {
        let class = path.split(' ').next().expect("a class").to_string();
        let d = path.split("d='").nth(1).expect("points").split('\'').next().expect("an end");
        (class, d.matches(['M', 'L']).count())
    };
    paths.map(points).collect()
}

/// Checks what holds for every page.
pub(crate) fn check(page: &str, case: &str) {
    for other in ["http://", "https://", "<link", "url(", "@import", "src="] {
        assert!(!page.contains(other), "{case}: the page reaches for `{other}`");
    }
    let before_script = page.split("<script>").next().expect("a part");
    for wrong in ["NaN", "inf'", "inf ", "='inf", "-inf"] {
        assert!(!before_script.contains(wrong), "{case}: `{wrong}`");
    }
    for tag in ["svg", "table", "section", "details", "div", "figure", "script"] {
        let count = |text: &str| page.matches(text).count();
        let open = count(&format!("<{tag}>")) + count(&format!("<{tag} "));
        assert_eq!(open, count(&format!("</{tag}>")), "{case}: <{tag}>");
    }
    let data = page.split("id=timeline-data>").nth(1).expect("data");
    let data = data.split("</script>").next().expect("an end");
    let _: Value = serde_json::from_str(data).unwrap_or_else(|e| panic!("{case}: {e}"));
}

const FACTORS: [&[&str]; 8] = [
    &["gpt2", "mlp", "resnet"],
    &["sharding.ranks=1", "sharding.ranks=2", "sharding.ranks=4"],
    &["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"],
    &["precision.compute=fp32", "precision.compute=bf16", "precision.compute=fp16"],
    &["run.accumulation=1", "run.accumulation=3"],
    &["memory.recompute=none", "memory.recompute=unit"],
    &["memory.offload=none", "memory.offload=optimizer"],
    &["once", "resumed"],
];

/// A replica is two ranks.
fn is_possible(row: &Row) -> bool {
    let hybrid = row[2].is_some_and(|s| FACTORS[2][s] == "hybrid_shard");
    !hybrid || row[1].is_none_or(|ranks| ranks > 0)
}

#[test]
fn every_plan_and_its_runs_have_a_page() {
    for row in rows(&FACTORS, is_possible) {
        let words: Vec<&str> = row.iter().zip(FACTORS).map(|(level, f)| f[*level]).collect();
        let case = words.join(", ");
        let strategy = format!("sharding.strategy={}", words[2]);
        let mut settings = vec![words[1], &strategy, words[3], words[4], words[5], words[6]];
        if words[2] == "hybrid_shard" {
            settings.push("sharding.shard_group=2");
        }
        let planned =
            plan_to_evaluate(&format!("tests/models/{}/model.onnx", words[0]), 4, &settings);
        if words[7] == "resumed" {
            trained(&planned, words[0], 1);
        }
        let (metrics, trace) = trained(&planned, words[0], 3);
        let args = ["--metrics".as_ref(), &*metrics, "--trace".as_ref(), &*trace];
        let page = page(&planned, &args).unwrap_or_else(|e| panic!("{case}: {e}"));
        check(&page, &case);
        let losses = points(&page, "Loss");
        assert_eq!(losses[0], ("line".into(), 3), "{case}");
        assert!(
            losses.contains(&("dots".into(), 2)) || words[7] == "resumed",
            "{case}: {losses:?}"
        );
        assert_eq!(points(&page, "Step time")[0].1, 3, "{case}");
        let ranks = planned.compiled.plan.world_size;
        for rank in 0..ranks {
            assert!(page.contains(&format!("measured, rank {rank}\"")), "{case}");
        }
        assert_eq!(page.contains("resumed at step 1"), words[7] == "resumed", "{case}");
        assert!(!page.contains("of another plan"), "{case}");
        assert!(page.contains("certified</span> every rank computes the step"), "{case}");
    }
}

/// Lines of a run, as of `frit run --metrics`.
fn lines(run: &str, steps: std::ops::Range<usize>) -> String {
    let line = |step: usize| {
        let line = json!({
            "step": step, "loss": 3.0 / (step + 1) as f64, "grad_norm": 1.0, "lr": 1e-3, "loss_scale": 1024.0,
            "skipped": step % 7 == 3, "tokens_or_examples_per_s": 1e4, "step_seconds": 1e-3, "run": run,
        });
        line.to_string() + "\n"
    };
    steps.map(line).collect()
}

#[test]
fn runs_are_drawn_with_all_of_their_steps() {
    let planned = plan("tests/models/mlp/model.onnx", 4, &["precision.compute=fp16"]);
    let dir = planned.dir.path();
    let write = |name: &str, text: &str| {
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(&path, text).expect("written");
        path
    };
    let killed = lines("a", 0..50) + "{\"step\":50,\"lo";
    let resumed = lines("b", 0..30) + &lines("c", 20..40);
    let twice = lines("d", 0..10) + &lines("e", 0..5);
    let paths = [
        write("killed/metrics.jsonl", &killed),
        write("resumed/metrics.jsonl", &resumed),
        write("twice/metrics.jsonl", &twice),
        write("empty/metrics.jsonl", ""),
        write("long/metrics.jsonl", &lines("f", 0..20_000)),
    ];
    let mut args: Vec<&Path> = vec!["--metrics".as_ref()];
    args.extend(paths.iter().map(PathBuf::as_path));
    let page = page(&planned, &args).expect("a page");
    check(&page, "many runs");
    let steps: Vec<usize> = points(&page, "Learning rate").iter().map(|(_, n)| *n).collect();
    assert_eq!(steps[..4], [50, 40, 10, 5]);
    assert!((500..=1000).contains(&steps[4]), "{steps:?}");
    for part in [
        "the last line is incomplete",
        "resumed at step 20",
        ">twice (2)</label>",
        "the file has no lines yet",
        "<figcaption>Skipped steps",
        "<figcaption>Loss scale",
    ] {
        assert!(page.contains(part), "no `{part}`");
    }
    // What the page says is also a warning.
    let runs = frit::report::runs::read(&paths).expect("runs");
    let measured = frit::report::Measured { runs, ..Default::default() };
    let warnings = measured.warnings();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings.iter().all(|w| w.code == "W115"));
    assert!(page.len() < 600_000, "{} bytes", page.len());
}

#[test]
fn files_that_are_no_runs_are_refused() {
    let planned = plan("tests/models/mlp/model.onnx", 4, &["sharding.ranks=2"]);
    let other = plan("tests/models/mlp/model.onnx", 2, &["sharding.ranks=2"]);
    let dir = planned.dir.path();
    let data = file("tests/models/mlp/data.safetensors");
    let traced = |planned: &Planned| {
        let trace = planned.dir.path().join("trace.json");
        let options = RunOptions {
            steps: 1,
            data: data.clone().into(),
            trace: Some(trace.clone()),
            threads: Some(1),
            ..RunOptions::default()
        };
        run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
        trace
    };
    let (trace, foreign) = (traced(&planned), traced(&other));
    let text = std::fs::read_to_string(&trace).expect("a trace");
    let torn = dir.join("torn.json");
    std::fs::write(&torn, &text[..text.len() / 2]).expect("written");
    let simulated = dir.join("simulated.json");
    let (path, to) = (planned.path(), simulated.to_str().expect("a path"));
    let path = path.to_str().expect("a path");
    let simulate = ["frit", "simulate", path, "--cluster", "h100", "--trace", to];
    execute(&Cli::try_parse_from(simulate).expect("arguments")).expect("a simulation");
    let list = dir.join("list.json");
    std::fs::write(&list, "[1, 2]").expect("written");
    let missing = dir.join("missing.jsonl");
    let cases: [(&str, &Path, &str); 8] = [
        ("--metrics", &missing, "cannot read the metrics"),
        ("--metrics", &data, "holds no metrics: line 1 is not a JSON object"),
        ("--metrics", &trace, "holds no metrics: line 1 is not a JSON object"),
        ("--trace", &missing, "cannot read the trace"),
        ("--trace", &torn, "it is not complete JSON"),
        ("--trace", &list, "it has no list `traceEvents`"),
        ("--trace", &simulated, "is no trace of a run: the event"),
        ("--trace", &foreign, "is a trace of another plan: task"),
    ];
    for (option, path, says) in cases {
        let message = page(&planned, &[option.as_ref(), path]).expect_err(says);
        assert!(message.contains(says) && message.contains("E115"), "{option}: {message}");
        assert!(!dir.join("report.html").exists(), "{option} {says}");
    }
    page(&planned, &["--trace".as_ref(), &trace]).expect("its own trace");
}

#[test]
fn the_page_of_a_large_plan_is_small() {
    let settings = ["sharding.ranks=8", "precision.compute=bf16", "run.accumulation=4"];
    let planned = plan("tests/models/gpt2/model.onnx", 4, &settings);
    let plan = &planned.compiled.plan;
    let mut events = vec![];
    let mut at = 0.0;
    while events.len() < 8 * 1000 {
        for (i, task) in plan.tasks.iter_enumerated() {
            for rank in 0..8 {
                let args = json!({"task": i, "flops": task.flops, "bytes": task.bytes});
                let (ts, dur) = (at, 12.345_678 + i.0 as f64);
                events.push(json!({"ph": "X", "pid": rank, "ts": ts, "dur": dur, "name": task.name, "args": args}));
            }
            at += 12.5 + i.0 as f64;
        }
    }
    let trace = planned.dir.path().join("trace.json");
    std::fs::write(&trace, json!({"traceEvents": events}).to_string()).expect("written");
    let page = page(&planned, &["--trace".as_ref(), &trace, "--quick".as_ref()]).expect("a page");
    check(&page, "8 ranks");
    let spans = events.len();
    assert!(page.len() < 160_000 + 20 * spans, "{} bytes for {spans} spans", page.len());
    eprintln!("{} bytes for {} tasks and {spans} measured spans", page.len(), plan.tasks.len());
}

/// The section of a page about the certificate, without its markup.
fn certificate(page: &str) -> String {
    let section = page.split("<section id=certificate-section>").nth(1).expect("the section");
    let section = section.split("</section>").next().expect("an end");
    let words = section.split('<').map(|tag| tag.split_once('>').map_or(tag, |(_, text)| text));
    words.map(str::trim).filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_page_has_the_certificate_of_the_plan() {
    let fixed = ["precision.compute=bf16", "padding.tensor_cores=always"];
    let adapter = ["adapter.kind=lora", "adapter.rank=2", "adapter.targets=[\"fc1\"]"];
    for (model, more) in [("gpt2", &["sharding.ranks=2"][..]), ("mlp", &adapter)] {
        let settings = [&fixed, more].concat();
        let planned = plan_to_evaluate(&format!("tests/models/{model}/model.onnx"), 4, &settings);
        let dir = planned.path();
        let found = verify::certified(&dir, None, false).unwrap_or_else(|e| panic!("{e}"));
        let page = page(&planned, &[]).expect("a page");
        check(&page, model);
        let said = certificate(&page);
        let mut outputs = 0;
        for (verdict, group) in found.groups() {
            let row = [verdict.words(), &group.count().to_string(), &group.kinds()].join("\n");
            assert!(said.contains(&row), "{model}: no `{row}`: {said}");
            outputs += group.count();
        }
        assert_eq!(outputs, found.outputs.len());
        let row = |p: &Checked| format!("{}\n{}", p.pass, p.verdict.words());
        for passes in [&found.passes, &found.evaluation] {
            let rows: Vec<String> = passes.iter().map(row).collect();
            assert!(said.contains(&rows.join("\n")), "{model}: {said}");
        }
        let assumed = found.assumptions();
        assert!(said.contains(&assumed.join("\n")), "{model}: {said}");
        let meant = if model == "mlp" { "adapter, evaluate" } else { "evaluate" };
        assert_eq!(assumed[0], format!("what these passes do is what the model means: {meant}"));
        assert!(said.contains(&found.rounded().expect("in bf16")), "{model}: {said}");
    }
}

/// A page is written all the same.
#[test]
fn a_page_without_a_certificate_says_why() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model.onnx");
    std::fs::copy(file("tests/models/mlp/model.onnx"), &model).expect("copied");
    let planned = plan_to_evaluate_at(&model, 4, &["sharding.ranks=2"]);
    let dir = planned.path();
    let output = planned.dir.path().join("report.html");
    let said = |dir: &Path, more: &[&str]| {
        let [dir, to] = [dir, &output].map(|path| path.to_str().expect("UTF-8"));
        frit(&[&["report", dir, "-o", to], more].concat()).unwrap_or_else(|e| panic!("{e}"));
        let page = std::fs::read_to_string(&output).expect("the page");
        check(&page, "without a certificate");
        let said = certificate(&page);
        assert!(said.contains(&format!("frit verify {dir}")), "{said}");
        assert!(!said.contains("every rank computes"), "{said}");
        said
    };
    let is_said = |said: String, parts: &[&str]| {
        parts.iter().for_each(|part| assert!(said.contains(part), "no `{part}`: {said}"));
    };
    is_said(said(&dir, &["--quick"]), &["left out"]);
    is_said(
        said(&dir.join(layout::EVALUATION), &[]),
        &["no certificate", "has no trace of the passes", "certifies both", "E118"],
    );
    let other = file("tests/models/gpt2/model.onnx");
    let other = ["--model", other.to_str().expect("UTF-8")];
    is_said(said(&dir, &other), &["no certificate"]);

    let plan = plan_dir::read(&dir).unwrap_or_else(|e| panic!("{e}"));
    let write = |change: &dyn Fn(&mut Plan)| {
        let mut plan = plan.clone();
        change(&mut plan);
        std::fs::write(dir.join(layout::PLAN), seal(&plan.to_json())).expect("written");
    };
    write(&|plan| plan.name = "<another>".into());
    is_said(
        said(&dir, &[]),
        &["is not what its model compiles to", "these parts of it differ: name"],
    );
    write(&|plan| plan.loss_capacity *= 2);
    is_said(said(&dir, &[]), &["no certificate", "P303"]);
    write(&|plan| plan.pass_trace = None);
    is_said(said(&dir, &[]), &["has no trace of the passes", "compile the model again"]);
    write(&|_| ());
    std::fs::remove_file(&model).expect("removed");
    std::fs::remove_file(dir.join(layout::WEIGHTS)).expect("removed");
    is_said(said(&dir, &[]), &["No such file", "--model FILE"]);
}
