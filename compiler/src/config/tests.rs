//! Tests of the configuration.

use super::{Config, KEYS, Kind, LossScale, help, json_schema, page};
use frit_ir::DType;
use frit_ir::ops::OptimizerKind;
use frit_ir::plan::Strategy;
use frit_passes::loss::LossKind;

fn errors(text: &str, sets: &[&str]) -> String {
    let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
    Config::parse(text, "train.toml", &sets).unwrap_err().to_string()
}

#[test]
fn defaults_are_those_of_the_table() {
    let config = Config::default();
    assert_eq!(config.optimizer.kind, OptimizerKind::Adamw);
    assert_eq!(config.optimizer.betas, [0.9, 0.999]);
    assert_eq!(config.precision.compute, DType::BF16);
    assert_eq!(config.precision.loss_scale, LossScale::Auto);
    assert_eq!(config.sharding.param_dtype, None);
    assert_eq!(config.memory.budget, None);
    assert_eq!(config.loss.ignore_index, -100);
    assert_eq!(config.params.trainable, ["**"]);
}

#[test]
fn a_file_and_settings_are_read_in_order() {
    let text = "[optimizer]\nlr = 3e-4\nkind = \"sgd\"\n[precision]\ncompute = \"f16\"\nloss_scale = 8\n\
                [[precision.override]]\nscope = \"vae.**\"\ndtype = \"f32\"\n\
                [memory]\nbudget = \"2GiB\"\n[loss]\nclass_axis = 1\n[run]\nseed = 1e3\n";
    let sets = ["optimizer.lr=0.5", "loss.kind=mse", "sharding.strategy=\"no_shard\""];
    let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
    let config = Config::parse(text, "train.toml", &sets).unwrap();
    assert_eq!(config.optimizer.lr, 0.5);
    assert_eq!(config.optimizer.kind, OptimizerKind::Sgd);
    assert_eq!(config.precision.compute, DType::F16);
    assert_eq!(config.precision.loss_scale, LossScale::Fixed(8.0));
    assert_eq!(config.precision.overrides[0].dtype, DType::F32);
    assert_eq!(config.memory.budget, Some(2 << 30));
    assert_eq!(config.loss.class_axis, Some(1));
    assert_eq!(config.loss.kind, LossKind::Mse);
    assert_eq!(config.sharding.strategy, Strategy::NoShard);
    assert_eq!(config.run.seed, 1000);
}

#[test]
fn the_print_out_reads_back() {
    let text = "[precision]\ncompute = \"fp16\"\n[[precision.override]]\nop = \"softmax\"\n\
                scope = \"h.**\"\ndtype = \"fp32\"\noutput = \"fp16\"\n\
                [[optimizer.group]]\nscope = \"h.*\"\nlr = 1\n[params]\nfrozen = [\"a.*\", 'b\"c']\n[memory]\nbudget = 1e9\n";
    let config = Config::parse(text, "", &[]).unwrap();
    let printed = config.to_toml();
    assert_eq!(Config::parse(&printed, "", &[]).unwrap(), config);
    assert!(printed.contains("compute = \"fp16\""), "{printed}");
    assert_eq!(Config::parse(&printed, "", &[]).unwrap().to_toml(), printed);
}

#[test]
fn every_key_is_in_the_help_and_the_print_out() {
    let (help, printed) = (help(), Config::default().to_toml());
    for key in KEYS {
        let name = key.name.split_once('.').unwrap().1;
        assert!(help.contains(&format!("  {name} = {}\n", key.default)), "{}", key.name);
        assert!(printed.contains(&format!("\n{name} = ")), "{}", key.name);
    }
}

/// What the schema says of configurations.
fn validator() -> impl Fn(&toml::Table) -> bool {
    let (mut schemas, mut compiler) = (boon::Schemas::new(), boon::Compiler::new());
    let schema = serde_json::from_str(&json_schema()).unwrap();
    compiler.add_resource("train.schema.json", schema).unwrap();
    let index = compiler.compile("train.schema.json", &mut schemas).unwrap();
    move |table| schemas.validate(&serde_json::to_value(table).unwrap(), index).is_ok()
}

#[test]
fn the_schema_is_up_to_date_and_accepts_what_the_reader_accepts() {
    expect_test::expect_file!["../../../docs/train.schema.json"].assert_eq(&json_schema());
    let mut probes: Vec<String> = [
        "0",
        "1",
        "-1",
        "3",
        "0.5",
        "1.0",
        "1.5",
        "1e12",
        "true",
        "\"\"",
        "\"word\"",
        "\"auto\"",
        "\"none\"",
        "\"f16\"",
        "\"bf16\"",
        "\"24GiB\"",
        "\"1e9\"",
        "\"24 apples\"",
        "[]",
        "[0.5, 0.9]",
        "[0.5, 1.0]",
        "[0.5]",
        "[\"a\"]",
        "[\"a\", 1]",
        "{}",
    ]
    .map(String::from)
    .into();
    probes.extend(KEYS.iter().map(|key| key.default.to_string()));
    let accepts = validator();
    let (mut accepted, mut refused) = (0, 0);
    for key in KEYS {
        let (section, name) = key.split();
        for probe in &probes {
            let text = format!("[{section}]\n{name} = {probe}\n");
            let table: toml::Table = text.parse().unwrap();
            let reads = key.read(&table[section][name]).is_ok();
            assert_eq!(accepts(&table), reads, "{text}");
            *(if reads { &mut accepted } else { &mut refused }) += 1;
        }
    }
    assert!(accepted > KEYS.len() && refused > KEYS.len(), "{accepted}, {refused}");
}

#[test]
fn the_schema_knows_lists_of_tables_and_refuses_other_keys() {
    let accepts = validator();
    for (text, right) in [
        ("[[precision.override]]\nop = \"softmax\"\ndtype = \"fp32\"", true),
        ("[[precision.override]]\nop = \"softmax\"", false),
        ("[[precision.override]]\ndtype = \"fp32\"", false),
        ("[[optimizer.group]]\nscope = \"h.*\"\nlr = 1", true),
        ("[[optimizer.group]]\nscope = \"h.*\"", false),
        ("[[optimizer.group]]\nscope = \"h.*\"\nlr = -1", false),
        ("[optimizer]\nlearning_rate = 1", false),
        ("[optimiser]\nlr = 1", false),
    ] {
        assert_eq!(Config::parse(text, "", &[]).is_ok(), right, "{text}");
        let table: toml::Table = text.parse().unwrap();
        assert_eq!(accepts(&table), right, "{text}");
    }
}

#[test]
fn the_page_of_keys_is_up_to_date() {
    expect_test::expect_file!["../../../docs/configuration.md"].assert_eq(&page());
}

#[test]
fn every_integer_has_a_range() {
    let help = help();
    for key in KEYS {
        let Kind::Integer(min, max) = key.kind else { continue };
        assert!(help.contains(&key.kind.describe()), "{}", key.name);
        let beyond = [max.checked_add(1), min.checked_sub(1), Some(4_611_686_018_427_387_904)];
        let beyond = beyond.into_iter().flatten().filter(|n| !(min..=max).contains(n));
        for n in beyond.map(|n| n.to_string()).chain(["-1".into(), "1.5".into()]) {
            let text = errors("", &[&format!("{}={n}", key.name)]);
            assert!(
                text.contains(&format!("`{}` must be a whole number from", key.name)),
                "{text}"
            );
        }
    }
}

#[test]
fn any_value_of_any_key_is_taken_or_refused() {
    let values = [
        "-1",
        "0",
        "-9223372036854775808",
        "9223372036854775807",
        "1e308",
        "-1e308",
        "nan",
        "inf",
        "0.5",
        "\"\"",
        "\"auto\"",
        "\"none\"",
        "[]",
        "[\"\"]",
        "[-1.0, 2.0]",
        "true",
        "{}",
        "1979-05-27",
    ];
    for key in KEYS {
        for value in values {
            let set = format!("{}={value}", key.name);
            let _: Result<Config, _> = Config::parse("", "", &[set]);
        }
    }
    let text = errors("", &["run.reproducible=-1", "data.document_separator=-1"]);
    assert!(text.matches("a whole number of at least 0").count() == 2, "{text}");
}

#[test]
fn numbers_are_those_that_a_plan_holds() {
    for (set, expected) in [
        ("optimizer.lr=1e39", "`optimizer.lr` must be a number of at least 0 and below 3.4e38"),
        ("precision.init_scale=1e-300", "a number above 0 and below 3.4e38"),
        ("optimizer.lr=inf", "`optimizer.lr` must be"),
    ] {
        assert!(errors("", &[set]).contains(expected), "{}", errors("", &[set]));
    }
}

#[test]
fn unknown_keys_are_named_with_their_place_and_nearest_name() {
    let text = errors("[optimizer]\n  learning = 1\nlr_ = 2\n[sharding]\nrnks = 2\n", &[]);
    assert!(text.contains("train.toml:2:3: unknown key `optimizer.learning`"), "{text}");
    assert!(text.contains("train.toml:3:1: unknown key `optimizer.lr_`"), "{text}");
    assert!(text.contains("did you mean `optimizer.lr`?"), "{text}");
    assert!(text.contains("did you mean `sharding.ranks`?"), "{text}");
    let text = errors("", &["optimiser.lr=1"]);
    assert!(text.contains("--set optimiser.lr: unknown key"), "{text}");
    assert!(text.contains("did you mean `optimizer.lr`?"), "{text}");
    assert!(errors("x = 1", &[]).contains("unknown key `x`"));
}

#[test]
fn wrong_values_say_what_is_expected() {
    for (text, expected) in [
        (
            "[optimizer]\nlr = \"a\"",
            "train.toml:2:1: `optimizer.lr` must be a number of at least 0",
        ),
        ("[optimizer]\nlr = nan", "`optimizer.lr` must be"),
        ("[optimizer]\nbetas = [1.0, 0.9]", "two numbers from 0 to below 1"),
        ("[sharding]\nranks = 0", "a whole number from 1 to 65536"),
        ("[sharding]\nreduce_dtype = \"int\"", "one of \"fp32\""),
        ("[loss]\nkind = \"hinge\"", "one of \"cross_entropy\", \"mse\""),
        ("[memory]\nbudget = \"2 parsecs\"", "bytes such as"),
        ("[schedule]\nkind = \"cosine\"", "`schedule.total_steps` is 0"),
        ("[sharding]\nranks = 4\nshard_group = 2", "no meaning in `full_shard`"),
        (
            "[sharding]\nranks = 4\nstrategy = \"hybrid_shard\"\nshard_group = 3",
            "does not divide 4 ranks",
        ),
        ("[[precision.override]]\nscope = \"a\"", "`dtype` is missing"),
        ("[[precision.override]]\ndtype = \"fp32\"", "give `scope`, `op` or both"),
        ("[[optimizer.group]]\nlr = 1", "`scope` is missing"),
        ("[[optimizer.group]]\nscope = \"a\"", "none of `lr`, `weight_decay` and `kind`"),
        (
            "[[optimizer.group]]\nscope = \"a\"\nlr = -1",
            "`optimizer.lr` must be a number of at least 0",
        ),
        ("[[optimizer.group]]\nscope = \"a\"\nkind = \"sgd\"", "must be \"muon\" or \"adamw\""),
        ("[[optimizer.group]]\nscope = \"a\"\nkind = 3", "must be \"muon\" or \"adamw\""),
        (
            "[[optimizer.group]]\nscope = \"a\"\nkind = \"muon\"",
            "has no effect with `optimizer.kind` = \"adamw\"",
        ),
        ("[optimizer]\nadamw_lr = 1e-3", "`optimizer.adamw_lr` has no effect"),
        ("[optimizer]\nadamw_weight_decay = 0", "`optimizer.adamw_weight_decay` has no effect"),
        ("[optimizer]\nkind = \"muon\"\nadamw_lr = -1", "`optimizer.adamw_lr` must be"),
        ("[optimizer]\nmuon_ns_coefficients = [1, 2]", "must be three numbers"),
        ("[optimizer]\nmuon_ns_coefficients = [1, 2, inf]", "must be three numbers"),
        ("[optimizer]\nmuon_ns_steps = 0", "a whole number from 1 to 99"),
        ("[optimizer]\nmuon_adjust_lr = \"moonshot\"", "\"match_rms_adamw\""),
        ("[[optimizer.group]]\nscope = \"a\"\nbeta = 1", "unknown key `beta`"),
        ("[optimizer]\ngroup = 3", "`optimizer.group` is a list of tables"),
        ("[schedule]\nkind = \"step\"", "`schedule.step_size` is 0"),
        ("[schedule]\nkind = \"one_cycle\"", "has no step to rise or none to fall"),
        (
            "[schedule]\nkind = \"one_cycle\"\ntotal_steps = 10\nwarmup_steps = 2",
            "one_cycle warms up itself",
        ),
        ("[optimizer\nlr = 1", "train.toml:1:11: "),
    ] {
        let found = errors(text, &[]);
        assert!(found.contains(expected), "{text:?} gave {found}");
    }
    assert!(errors("", &["optimizer.lr"]).contains("there is no `=`"));
    assert!(errors("", &["optimizer.lr=fast"]).contains("must be a number"));
}

#[test]
fn presets() {
    let pure = Config::parse("", "", &["precision.compute=bf16-pure".into()]).unwrap();
    assert_eq!((pure.precision.compute, pure.precision.pure), (DType::BF16, true));
    let printed = pure.to_toml();
    assert!(printed.contains("compute = \"bf16\"\npure = true"), "{printed}");
    assert_eq!(Config::parse(&printed, "", &[]).unwrap(), pure);
}
