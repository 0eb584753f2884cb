//! `gradprism train` as it is run: kills, interruptions, resuming, wrong usage.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{config, gradprism, stderr};
use gradprism::config::Config;
use gradprism::log::{TrainLog, TrainingDirectory};
use gradprism::trainer::checkpoint::latest;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

/// A bandit run that is short, and saves after every second step.
const SHORT: [&str; 10] = [
    "training.groups=2",
    "training.group_size=4",
    "decomposition.every=4",
    "diagnostics.every=3",
    "validation.every=5",
    "validation.groups=2",
    "training.rollouts_every=5",
    "checkpoint.every=2",
    "optimizer.learning_rate=0.001",
    "threads=1",
];

fn train(out: &Path, steps: usize, arguments: &[&str]) -> Command {
    let mut command = gradprism(&["train"]);
    command.arg(config("bandit.yaml")).arg("--out").arg(out);
    for setting in
        SHORT.iter().map(|it| (*it).to_owned()).chain([format!("training.steps={steps}")])
    {
        command.arg("--set").arg(setting);
    }
    command.args(arguments);
    command
}

/// Everything that a run leaves, without what differs between equal runs: lines by file, and the files
/// of the last checkpoint.
fn outcome(run: &Path) -> (BTreeMap<&'static str, Vec<Value>>, Vec<Vec<u8>>) {
    let lines = |name: &'static str| {
        let text = std::fs::read_to_string(run.join(name)).unwrap();
        let parse = |line: &str| {
            let mut line: Value = serde_json::from_str(line).unwrap();
            line.as_object_mut().unwrap().remove("time");
            line
        };
        (name, text.lines().map(parse).collect())
    };
    let checkpoint = latest(&run.join("checkpoints")).unwrap().unwrap().checkpoint;
    let files = ["policy.pt", "optimizer.safetensors", "random.safetensors", "state.json"];
    (
        ["steps.jsonl", "prompts.jsonl", "rollouts.jsonl"].into_iter().map(lines).collect(),
        files.iter().map(|name| std::fs::read(checkpoint.file(name).unwrap()).unwrap()).collect(),
    )
}

fn assert_same_outcome(found: &Path, expected: &Path) {
    let ((found_lines, found_files), (lines, files)) = (outcome(found), outcome(expected));
    for (name, lines) in &lines {
        assert_eq!(&found_lines[name], lines, "{name}");
    }
    assert!(found_files == files, "the last checkpoint, bit for bit");
}

fn spawn(command: &mut Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits so long at most; whether the process has ended.
fn has_ended(child: &mut Child, wait: Duration) -> bool {
    let until = Instant::now() + wait;
    while Instant::now() < until {
        if child.try_wait().unwrap().is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    false
}

#[test]
fn twenty_kills_cost_nothing() {
    const STEPS: usize = 40;
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole");
    let started = Instant::now();
    assert!(train(&whole, STEPS, &["-q"]).status().unwrap().success());
    let duration = started.elapsed().as_secs_f64();
    let mut random = ChaCha8Rng::seed_from_u64(6);
    let (mut kills, mut runs) = (0, 0);
    while kills < 20 {
        runs += 1;
        let run = folder.path().join(runs.to_string());
        loop {
            let mut child = spawn(&mut train(&run, STEPS, &["-q", "--resume"]));
            // Now and then the first kill falls before anything is written.
            let wait = Duration::from_secs_f64(duration * random.random_range(0.02..0.6));
            if kills < 20 && !has_ended(&mut child, wait) {
                // SIGKILL.
                child.kill().unwrap();
                child.wait().unwrap();
                kills += 1;
                continue;
            }
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", stderr(&output));
            break;
        }
        assert_same_outcome(&run, &whole);
        read_by_tensorboard(&run, STEPS);
    }
    assert!(runs < 20, "a run outlives several kills");
}

/// TensorBoard sees every step once, whatever was written before a kill.
fn read_by_tensorboard(run: &Path, steps: usize) {
    let Some(python) = common::python("read_by_tensorboard") else { return };
    let script = "import sys\n\
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n\
        events = EventAccumulator(sys.argv[1], size_guidance={'scalars': 0})\n\
        events.Reload()\n\
        print([event.step for event in events.Scalars('reward/mean')] == list(range(int(sys.argv[2]))))";
    let output =
        Command::new(python).args(["-c", script]).arg(run).arg(steps.to_string()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "True", "{}", stderr(&output));
}

#[test]
fn an_interrupted_run_is_whole_and_goes_on() {
    const STEPS: usize = 30;
    let folder = tempfile::tempdir().unwrap();
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    assert!(train(&whole, STEPS, &["-q"]).status().unwrap().success());
    let mut child = spawn(&mut train(&parts, STEPS, &[]));
    let steps = parts.join("steps.jsonl");
    let until = Instant::now() + Duration::from_secs(60);
    while std::fs::read_to_string(&steps).unwrap_or_default().lines().count() < 3 {
        assert!(Instant::now() < until, "three steps take no minute");
        std::thread::sleep(Duration::from_millis(5));
    }
    let interrupt = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(interrupt.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let summary: Value =
        serde_json::from_str(&std::fs::read_to_string(parts.join("summary.json")).unwrap())
            .unwrap();
    assert_eq!(summary["partial"], true);
    let made = summary["steps"].as_u64().unwrap();
    assert_eq!(std::fs::read_to_string(&steps).unwrap().lines().count() as u64, made);
    let checkpoint = latest(&parts.join("checkpoints")).unwrap().unwrap().checkpoint;
    assert_eq!(checkpoint.step(), made);

    let output =
        train(&parts, STEPS, &["--resume", "--set", "checkpoint.keep=3"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let said = stderr(&output);
    assert!(said.contains("is not that of the run so far: checkpoint.keep"), "{said}");
    assert!(said.contains(&format!("going on after step {made}")), "{said}");
    assert_same_outcome(&parts, &whole);
}

/// The messages of an event file: length, checksum of it, message, checksum.
fn events(path: &Path) -> Vec<Vec<u8>> {
    let bytes = std::fs::read(path).unwrap();
    let mut rest = bytes.as_slice();
    let mut events = Vec::new();
    while let Some((length, after)) = rest.split_first_chunk::<8>() {
        let length = u64::from_le_bytes(*length) as usize;
        events.push(after[4..4 + length].to_vec());
        rest = &after[4 + length + 4..];
    }
    events
}

#[test]
fn a_resumed_run_says_to_tensorboard_where_it_begins() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    assert!(train(&run, 2, &["-q"]).status().unwrap().success());
    assert!(train(&run, 4, &["-q", "--resume"]).status().unwrap().success());
    let mut files: Vec<PathBuf> = std::fs::read_dir(&run)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("events.out."))
        .collect();
    // TensorBoard reads them in the order of their names.
    files.sort();
    assert_eq!(files.len(), 2);
    for (file, step) in files.iter().zip([0, 2]) {
        let start = &events(file)[1];
        // Of tensorflow.Event: step is field 2, session_log field 7; its status, field 1, is START, 1.
        let mut expected = vec![0x3a, 2, 0x08, 1];
        if step > 0 {
            expected = [vec![0x10, step], expected].concat();
        }
        let is_there = start.windows(expected.len()).any(|window| window == expected);
        assert!(is_there, "step {step}: {start:x?}");
    }
}

#[test]
fn the_summary_says_how_fast_and_where_the_time_went() {
    let folder = tempfile::tempdir().unwrap();
    let output = train(&folder.path().join("run"), 2, &["--json", "-q"]).output().unwrap();
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    let time = &summary["time"];
    let seconds = |name: &str| time[name].as_f64().unwrap();
    // 2 steps of 2 groups of 4 trajectories of 1 token.
    assert_eq!(time["sampled_tokens"], 16);
    let parts =
        ["sampling", "scoring", "decomposition", "diagnosis", "update", "validation", "checkpoint"];
    let sum: f64 = parts.iter().map(|part| seconds(part)).sum();
    assert!(sum <= seconds("total") && sum > 0.5 * seconds("total"), "{time}");
    let table = train(&folder.path().join("table"), 2, &[]).output().unwrap();
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(table.contains("tokens a second: ") && table.contains("2 steps, "), "{table}");
}

/// The exit code and the message of wrong usage, of which nothing may be left.
fn refused(folder: &Path, arguments: &[&str]) -> (i32, String) {
    let out = folder.join("run");
    let output = train(&out, 1, arguments).output().unwrap();
    assert!(!out.exists(), "{arguments:?} leaves nothing behind");
    (output.status.code().unwrap(), stderr(&output))
}

#[test]
fn wrong_settings_are_refused_before_anything_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let value = config("train/bandit_value.pt").display().to_string();
    let critic = format!("critic.checkpoint={value}");
    for (settings, expected) in [
        (&["environment=null"][..], "environment: expected an environment"),
        (&["sampling.tokenizer=null"], "sampling.tokenizer: expected the tokenizer.json"),
        (&["policy.kind=step"], "policy.kind: expected causal_lm"),
        (&["algorithm.preset=ppo"], "critic.checkpoint: expected a TorchScript value model"),
        (&[critic.as_str()], "critic.checkpoint: expected none, since only the advantage gae"),
        (&["training.group_size=1"], "training.group_size: expected at least 2"),
        (&["training.groups=0"], "training.groups: expected a number from 1 to 1000000, found 0"),
        (&["training.seed=4294967296"], "training.seed: expected a number below 2^32"),
        (&["filter.score=snr"], "decomposition.every: expected 1, since the filter ranks by snr"),
        (&["rollouts.old_logprobs=recompute"], "rollouts.old_logprobs: expected file"),
        (&["sampling.prompt_format=x"], "sampling.prompt_format: expected a text with one {}"),
        (&["sampling.top_p=0"], "sampling.top_p: expected a number above 0 and at most 1, found 0"),
        (
            &["optimizer.betas=[0.9, 1.0]"],
            "optimizer.betas: expected a number of at least 0 and below 1",
        ),
        (
            &["optimizer.learning_rate=1.0e+10"],
            "optimizer.learning_rate: expected a number from 0 to 1000000, found 1",
        ),
        (&["sampling.dynamic={rounds: 0}"], "sampling.dynamic.rounds: expected at least 1"),
        (&["early_stop.empty_filters={filters: 0}"], "early_stop.empty_filters.filters: expected"),
        (&["training.groups=10000000"], "training.groups: expected a number from 1 to 1000000"),
        (&["optimizer.epsilon=0"], "optimizer.epsilon: expected a number above 0"),
        (&["optimizer.max_norm=0"], "optimizer.max_norm: expected"),
        (&["optimizer.cosine={updates: 5}", "optimizer.warmup=5"], "optimizer.cosine.updates"),
        (
            &["early_stop.validation={floor: 0, validations: 1}", "validation.every=0"],
            "set validation.every",
        ),
        (&["environment.low_reward=x"], "environment"),
        (&["environment.lowreward=1"], "did you mean `low_reward`"),
        (&["trainig.steps=1"], "did you mean `training`"),
        (&["environment={name: chess}"], "bandit"),
        (&["environment.rules.max_turns=0"], "max_turns: expected at least 1, found 0"),
    ] {
        let arguments: Vec<&str> = settings.iter().flat_map(|it| ["--set", *it]).collect();
        let (code, message) = refused(folder.path(), &arguments);
        assert_eq!(code, 2, "{settings:?}: {message}");
        assert!(message.contains(expected), "{settings:?}: {message}");
    }
    let missing = format!("policy.checkpoint={}", folder.path().join("none.pt").display());
    let (code, message) = refused(folder.path(), &["--set", &missing]);
    assert!(code == 1 && message.contains("none.pt"), "{code} {message}");
    // A policy is no value model.
    let policy = format!("critic.checkpoint={}", config("train/bandit.pt").display());
    let arguments = ["--set", "algorithm.preset=ppo", "--set", &policy];
    let (code, message) = refused(folder.path(), &arguments);
    assert!(code == 1 && message.contains("one number a position"), "{code} {message}");
    // Without --out there is nothing to resume.
    let output = gradprism(&["train", "x.yaml", "--resume"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
}

/// Every file of a folder with its contents.
fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.insert(path.clone(), std::fs::read(&path).unwrap());
            }
        }
    }
    files
}

#[test]
fn an_earlier_run_is_replaced_on_demand_only() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    assert!(train(&run, 1, &["-q"]).status().unwrap().success());
    let before = contents(&run);
    let refuse = |arguments: &[&str], expected: &str| {
        let output = train(&run, 1, arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
        assert!(contents(&run) == before, "{arguments:?} changes nothing");
    };
    refuse(&[], "holds an earlier run");
    // What the run reads must not lie where it would be replaced.
    let own = run.join("checkpoints/000001-step-1/policy.pt");
    let own = format!("policy.checkpoint={}", own.display());
    refuse(&["--force", "--set", &own], "which this run reads and would replace");
    let settings = [config("train/bandit.pt"), config("train/bandit.tokenizer.json")];
    std::fs::copy(config("bandit.yaml"), run.join("own.yaml")).unwrap();
    let output = gradprism(&["train"])
        .arg(run.join("own.yaml"))
        .args(["--set", &format!("policy.checkpoint={}", settings[0].display())])
        .args(["--set", &format!("sampling.tokenizer={}", settings[1].display())])
        .args(["--force", "--out", run.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(stderr(&output).contains("own.yaml, which this run reads"), "{}", stderr(&output));
    std::fs::remove_file(run.join("own.yaml")).unwrap();
    {
        let _held = TrainingDirectory::resume(&run).unwrap();
        refuse(&["--resume"], "another gradprism is training there");
        refuse(&["--force"], "another gradprism is training there");
    }
    assert!(train(&run, 2, &["-q", "--force"]).status().unwrap().success());
    assert_eq!(std::fs::read_to_string(run.join("steps.jsonl")).unwrap().lines().count(), 2);

    let other = folder.path().join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("thesis.tex"), "years").unwrap();
    for (arguments, expected) in [
        (&["--force"][..], "is no run directory"),
        (&["--resume"], "is not the directory of a training run"),
        (&[], "is no run directory"),
    ] {
        let output = train(&other, 1, arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
        assert_eq!(contents(&other).len(), 1);
    }
}

#[test]
fn resuming_loses_nothing_that_it_does_not_make_anew() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    assert!(train(&run, 4, &["-q"]).status().unwrap().success());
    // Of a finished run nothing is touched.
    let before = contents(&run);
    let output = train(&run, 4, &["--resume"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("nothing to do: the run has made 4 of 4 steps"), "{said}");
    assert!(contents(&run) == before);
    // A resumption that fails leaves the configuration of what was made.
    let text = |name: &str| std::fs::read_to_string(run.join(name)).unwrap();
    let config = text("config.resolved.yaml");
    let settings = ["--resume", "--set", "sampling.context_length=5"];
    assert_eq!(train(&run, 6, &settings).status().unwrap().code(), Some(1));
    assert_eq!(text("config.resolved.yaml"), config);
    assert!(train(&run, 6, &["-q", "--resume"]).status().unwrap().success());
    assert!(text("config.resolved.yaml").contains("steps: 6"));
    // Steps that no checkpoint can make anew.
    std::fs::rename(run.join("checkpoints"), folder.path().join("checkpoints")).unwrap();
    let steps = text("steps.jsonl");
    let output = train(&run, 8, &["--resume"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("has 6 steps, and there is no checkpoint"));
    assert_eq!(text("steps.jsonl"), steps);
}

#[test]
fn trajectories_are_taken_back_also_if_no_more_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let settings = ["-q", "--set", "training.rollouts_every=1"];
    assert!(train(&run, 3, &settings).status().unwrap().success());
    let steps = || {
        let text = std::fs::read_to_string(run.join("rollouts.jsonl")).unwrap();
        let step = |line: &str| serde_json::from_str::<Value>(line).unwrap()["step"].as_u64();
        text.lines().map(|line| step(line).unwrap()).collect::<Vec<u64>>()
    };
    assert_eq!(steps().last(), Some(&2));
    let silent = Config::load(&config("bandit.yaml"), &[]).unwrap().resolve_training().unwrap();
    assert_eq!(silent.train_sections().training.rollouts_every, 0);
    TrainLog::open(&TrainingDirectory::resume(&run).unwrap(), &silent, 2).unwrap();
    assert_eq!((steps().first(), steps().last()), (Some(&0), Some(&1)));
}

#[test]
fn a_directory_of_another_kind_or_in_use_is_left_alone() {
    let lines = common::lines(&common::synthetic_batch(2, 1));
    let study = || common::StudyFolder::new(&common::fixture("gpt2.pt"), &lines, "");
    let studied = study();
    assert_eq!(studied.run(&[]).status.code(), Some(0));
    let output = train(&studied.path("out"), 2, &["--resume"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("is not the directory of a training run"));

    let trained = study();
    assert!(train(&trained.path("out"), 2, &["-q"]).status().unwrap().success());
    let before = contents(&trained.path("out"));
    let training = TrainingDirectory::resume(&trained.path("out")).unwrap();
    let output = trained.run(&["--force"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("another gradprism is training there"));
    assert!(contents(&trained.path("out")) == before);
    drop(training);
    assert_eq!(trained.run(&["--force"]).status.code(), Some(0));
}

#[test]
fn a_damaged_checkpoint_gives_way_to_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, run) = (folder.path().join("whole"), folder.path().join("run"));
    assert!(train(&whole, 6, &["-q"]).status().unwrap().success());
    assert!(train(&run, 4, &["-q", "--set", "validation.every=0"]).status().unwrap().success());
    let newest = latest(&run.join("checkpoints")).unwrap().unwrap().checkpoint;
    std::fs::write(newest.file("policy.pt").unwrap(), "not a policy").unwrap();
    let output = train(&run, 6, &["--resume"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("an earlier checkpoint is taken"), "{}", stderr(&output));
    assert_same_outcome(&run, &whole);
}
