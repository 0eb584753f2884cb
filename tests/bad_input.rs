//! Bad input gives one clear error, exit code 1 or 2, and leaves nothing behind.

mod common;

use std::path::{Path, PathBuf};

use common::{StudyFolder, fixture, gradprism, lines, stderr, synthetic_batch};
use serde_json::{Value, json};

const FAILED: i32 = 1;
const WRONG_USAGE: i32 = 2;

fn good_lines() -> Vec<Value> {
    lines(&synthetic_batch(2, 1))
}

/// A study that works, but for what a test changes.
fn study(checkpoint: &Path) -> StudyFolder {
    StudyFolder::new(checkpoint, &good_lines(), "")
}

/// Runs, and expects one error that says all of `says`, the exit code, and no output.
#[track_caller]
fn assert_refused(folder: &StudyFolder, arguments: &[&str], code: i32, says: &[&str]) {
    let output = folder.run(arguments);
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    let errors: Vec<&str> = stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{stderr}");
    for text in says {
        assert!(stderr.contains(text), "`{stderr}` does not say `{text}`");
    }
    assert!(!stderr.contains("panicked"), "{stderr}");
    assert!(!stderr.contains("frame #"), "{stderr}");
    assert!(output.stdout.is_empty());
    assert!(!folder.has_output(), "something was left behind");
}

#[track_caller]
fn assert_checkpoint_refused(checkpoint: &Path, says: &[&str]) {
    let name = checkpoint.file_name().unwrap().to_str().unwrap();
    let mut says = says.to_vec();
    says.push(name);
    assert_refused(&study(checkpoint), &[], FAILED, &says);
}

#[test]
fn the_good_study_runs() {
    let folder = study(&fixture("gpt2.pt"));
    let output = folder.run(&[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(folder.prompts().len(), 2);
}

#[test]
fn a_missing_checkpoint() {
    assert_checkpoint_refused(&fixture("nowhere.pt"), &["no such file"]);
}

#[test]
fn empty_truncated_and_foreign_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| -> PathBuf {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    assert_checkpoint_refused(&file("empty.pt", b""), &["found an empty file"]);
    let whole = std::fs::read(fixture("gpt2.pt")).unwrap();
    let truncated = file("truncated.pt", &whole[..whole.len() / 2]);
    assert_checkpoint_refused(&truncated, &["truncated, damaged or of another format"]);
    let text = file("text.pt", b"this is no archive, but a text of some length");
    assert_checkpoint_refused(&text, &["TorchScript archive"]);
    assert_checkpoint_refused(folder.path(), &["found a directory"]);
    assert_checkpoint_refused(&fixture("state_dict.pt"), &["torch.save", "torch.jit.script"]);
}

#[test]
fn a_damaged_archive_is_refused_wherever_it_is_damaged() {
    let whole = std::fs::read(fixture("tied_traced.pt")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged.pt");
    for part in 1..8 {
        let mut bytes = whole.clone();
        let at = whole.len() * part / 8;
        bytes[at..at + 64].fill(0xa5);
        std::fs::write(&path, &bytes).unwrap();
        let output = study(&path).run(&[]);
        let code = output.status.code();
        // Damage in padding harms nobody; all other damage is an error, and none is a crash.
        assert!(code == Some(FAILED) || code == Some(0), "{part}: {code:?} {}", stderr(&output));
    }
}

#[test]
fn checkpoints_without_trainable_parameters() {
    assert_checkpoint_refused(&fixture("frozen.pt"), &["torch.jit.freeze", "unfrozen"]);
    assert_checkpoint_refused(&fixture("no_parameters.pt"), &["has no parameters"]);
    assert_checkpoint_refused(&fixture("no_grad.pt"), &["requires_grad_(True)"]);
    assert_refused(
        &study(&fixture("gpt2.pt")),
        &["--set", "policy.trainable=^decoder"],
        FAILED,
        &["`^decoder` matches no parameter", "wte.weight"],
    );
    assert_refused(
        &study(&fixture("gpt2.pt")),
        &["--set", "policy.trainable=(["],
        WRONG_USAGE,
        &["policy.trainable"],
    );
}

#[test]
fn wrong_weights_and_signatures() {
    assert_checkpoint_refused(&fixture("nan_weights.pt"), &["NaN or infinity", "blocks."]);
    assert_checkpoint_refused(&fixture("wrong_signature.pt"), &["policy.inputs", "n: int"]);
    assert_checkpoint_refused(&fixture("unknown_inputs.pt"), &["[input_ids, attention_mask]"]);
    assert_checkpoint_refused(&fixture("scalar_output.pt"), &["logits of shape [1, 4]"]);
    assert_checkpoint_refused(&fixture("tuple_output.pt"), &["policy.output", "`0`", "`1`"]);
    assert_checkpoint_refused(&fixture("bidirectional.pt"), &["causal"]);
    assert_checkpoint_refused(&fixture("mlp_step.pt"), &["a trial call of forward"]);
}

/// Changes the second line of good rollouts; the error names it and the field.
#[track_caller]
fn assert_line_refused(change: impl Fn(&mut Value), field: &str, says: &str) {
    let mut lines = good_lines();
    change(&mut lines[1]);
    let folder = StudyFolder::new(&fixture("gpt2.pt"), &lines, "");
    let place = format!("rollouts.jsonl:2: field `{field}`");
    assert_refused(&folder, &[], FAILED, &[&place, says]);
}

#[test]
fn bad_rollout_lines() {
    assert_line_refused(
        |line| line["prompt_ids"][0] = json!(16),
        "prompt_ids[0]",
        "below 16, the size of the vocabulary",
    );
    assert_line_refused(|line| line["response_ids"][1] = json!(99), "response_ids[1]", "found 99");
    assert_line_refused(|line| line["response_ids"] = json!([]), "response_ids", "empty array");
    assert_line_refused(|line| line["old_logprobs"] = json!([-1.0]), "old_logprobs", "entries");
    assert_line_refused(|line| line["reward"] = json!(null), "reward", "missing_reward: drop");
    let (first, second) = (good_lines()[0].clone(), good_lines()[1].clone());
    assert_line_refused(
        |line| line["trajectory_id"] = first["trajectory_id"].clone(),
        "trajectory_id",
        "as on line 1",
    );
    let last = second["old_logprobs"].as_array().unwrap().len() - 1;
    let field = format!("old_logprobs[{last}]");
    assert_line_refused(
        |line| line["old_logprobs"][last] = json!(null),
        &field,
        "found null or NaN",
    );
}

#[test]
fn non_finite_numbers_of_python() {
    for (number, field) in
        [("NaN", "reward"), ("Infinity", "reward"), ("-Infinity", "old_logprobs[")]
    {
        let folder = study(&fixture("gpt2.pt"));
        let mut line = good_lines()[1].clone();
        if field == "reward" {
            line["reward"] = json!("HERE");
        } else {
            let last = line["old_logprobs"].as_array().unwrap().len() - 1;
            line["old_logprobs"][last] = json!("HERE");
        }
        let text = format!("{}\n{line}\n", good_lines()[0]).replace("\"HERE\"", number);
        std::fs::write(folder.path("rollouts.jsonl"), text).unwrap();
        assert_refused(
            &folder,
            &[],
            FAILED,
            &[":2: ", &format!("field `{field}"), "finite"]
                .map(|text| if number == "NaN" && text == "finite" { "NaN" } else { text }),
        );
    }
}

#[test]
fn a_group_of_one() {
    let mut lines = good_lines();
    lines[1]["group_id"] = json!("alone");
    let folder = StudyFolder::new(&fixture("gpt2.pt"), &lines, "");
    assert_refused(
        &folder,
        &[],
        FAILED,
        &[":2: field `group_id`", "alone", "rollouts.single: drop"],
    );
}

#[test]
fn rollouts_that_lack_what_the_algorithm_needs() {
    let without = |key: &str| {
        let mut lines = good_lines();
        for line in &mut lines {
            line.as_object_mut().unwrap().remove(key);
        }
        StudyFolder::new(&fixture("gpt2.pt"), &lines, "")
    };
    let ppo = ["--set", "algorithm.preset=ppo"];
    assert_refused(&without("values"), &ppo, FAILED, &["`values`", "gae"]);
    assert_refused(&without("ref_logprobs"), &[], FAILED, &["`ref_logprobs`", "policy.reference"]);
}

#[test]
fn log_probabilities_that_no_policy_gives() {
    let mut lines = good_lines();
    // A log-ratio beyond what exp holds is clamped, and told.
    let last = lines[1]["old_logprobs"].as_array().unwrap().len() - 1;
    lines[1]["old_logprobs"][last] = json!(-900.0);
    let folder = StudyFolder::new(&fixture("gpt2.pt"), &lines, "");
    let output = folder.run(&[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("old_logprobs differ"), "{}", stderr(&output));
}

#[test]
fn wrong_configurations() {
    let folder = study(&fixture("gpt2.pt"));
    let refused = |setting: &str, says: &[&str]| {
        assert_refused(&folder, &["--set", setting], WRONG_USAGE, says);
    };
    refused("algorithm.clip_hgih=0.3", &["clip_hgih", "did you mean `clip_high`"]);
    refused("algoritm.clip_high=0.3", &["did you mean `algorithm`"]);
    refused("algorithm.preset=gpro", &["grpo", "`gpro`"]);
    refused("algorithm.clip_low=1.5", &["algorithm.clip_low", "from 0 to 1", "1.5"]);
    refused("algorithm.clip_high=-0.1", &["algorithm.clip_high", "-0.1"]);
    refused("algorithm.kl.coef=-1", &["algorithm.kl.coef", "from 0 to 1000000"]);
    refused("algorithm.kl.coef=.nan", &["algorithm.kl.coef", "NaN"]);
    refused("algorithm.entropy_coef=.inf", &["algorithm.entropy_coef", "inf"]);
    refused("algorithm.dual_clip=0.5", &["algorithm.dual_clip"]);
    refused("algorithm.gamma=1.1", &["algorithm.gamma"]);
    refused("algorithm.preset=dr_grpo", &["algorithm.norm_length", "generation limit"]);
    refused("algorithm.kl.coef=lots", &["algorithm.kl.coef"]);
    refused("policy.temperature=0", &["policy.temperature", "above 0"]);
    refused("filter.value=2", &["filter.value", "from 0 to 1"]);
    refused("threads=0", &["threads"]);
    refused("decomposition.buckets=[0.2, 0.1]", &["decomposition.buckets", "ascending"]);
    refused("decomposition.debias=true", &["decomposition.debias", "dr_grpo or rloo"]);
    refused("decomposition.buckets=100000", &["at most 1000"]);
    refused("algorithm.norm_length=-5", &["algorithm.norm_length", "-5"]);
    refused("algorithm.importance={level: token, cap: 0}", &["algorithm.importance.cap"]);
    refused("decomposition.engine=warp", &["decomposition.engine", "loop"]);
    refused("no_equals_sign", &["--set", "key=value"]);
    refused("policy.checkpoint.step=1", &["policy.checkpoint"]);
}

#[test]
fn wrong_configuration_files() {
    let folder = study(&fixture("gpt2.pt"));
    let refused = |text: &str, says: &[&str]| {
        std::fs::write(folder.path("study.yaml"), text).unwrap();
        assert_refused(&folder, &[], WRONG_USAGE, says);
    };
    refused("policy: {}\nalgorthm: {}\n", &["algorthm", "did you mean `algorithm`", "line 2"]);
    refused("policy:\n  chekpoint: x.pt\n", &["policy", "did you mean `checkpoint`", "study.yaml"]);
    refused("policy: [1, 2\n", &["study.yaml"]);
    refused("algorithm: {clip_low: much}\n", &["clip_low", "line 1"]);
    refused(
        "rollouts: {path: rollouts.jsonl}\n",
        &["policy.checkpoint", "--set policy.checkpoint=PATH"],
    );
    refused("policy: {checkpoint: x.pt}\n", &["rollouts.path"]);
    // The name alone, from within the folder.
    std::fs::write(folder.path("study.yaml"), "algorithm: {clip_low: 2}\n").unwrap();
    let mut command = gradprism(&["study", "study.yaml"]);
    let output = command.current_dir(folder.folder.path()).output().unwrap();
    assert!(stderr(&output).contains("algorithm.clip_low"), "{}", stderr(&output));

    let missing = gradprism(&["study", "nowhere.yaml"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(WRONG_USAGE));
    assert!(stderr(&missing).contains("nowhere.yaml: cannot be read"));
}

#[test]
fn wrong_usage() {
    for arguments in
        [&[][..], &["study"], &["stduy", "x.yaml"], &["study", "x.yaml", "--outt", "y"]]
    {
        let output = gradprism(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(WRONG_USAGE), "{arguments:?}");
    }
}

#[test]
fn a_cuda_device_on_a_cpu_build() {
    if tch::utils::has_cuda() {
        eprintln!("SKIPPED: this libtorch has CUDA");
        return;
    }
    let folder = study(&fixture("gpt2.pt"));
    for device in ["cuda", "cuda:1"] {
        assert_refused(&folder, &["--device", device], FAILED, &[device, "CPU build", "--cuda"]);
    }
    assert_refused(&folder, &["--device", "gpu"], WRONG_USAGE, &["gpu", "cuda:N"]);
}

#[test]
fn output_directories_that_cannot_be_used() {
    let folder = study(&fixture("gpt2.pt"));
    let config = folder.path("study.yaml");
    let run = |out: &Path, more: &[&str]| {
        let mut command = gradprism(&["study"]);
        let output = command.arg(&config).arg("--out").arg(out).args(more).output().unwrap();
        (output.status.code(), stderr(&output))
    };
    let out = folder.path("out");
    std::fs::create_dir(&out).unwrap();
    // An empty directory loses nothing.
    assert_eq!(run(&out, &[]).0, Some(0));
    let (code, message) = run(&out, &[]);
    assert_eq!(code, Some(FAILED));
    assert!(message.contains("holds an earlier run") && message.contains("--force"), "{message}");
    assert_eq!(run(&out, &["--force"]).0, Some(0));

    let foreign = folder.path("foreign");
    std::fs::create_dir(&foreign).unwrap();
    std::fs::write(foreign.join("thesis.tex"), "years of work").unwrap();
    for more in [&[][..], &["--force"]] {
        let (code, message) = run(&foreign, more);
        assert_eq!(code, Some(FAILED));
        assert!(message.contains("is no run directory"), "{message}");
    }
    assert!(foreign.join("thesis.tex").exists());
    let (code, message) = run(&foreign.join("thesis.tex"), &["--force"]);
    assert_eq!(code, Some(FAILED));
    assert!(message.contains("a file of that name exists"), "{message}");
    let (code, message) = run(&foreign.join("thesis.tex/out"), &[]);
    assert_eq!(code, Some(FAILED));
    assert!(message.contains("cannot be made"), "{message}");
    let (code, message) = run(Path::new("/proc/gradprism/out"), &[]);
    assert_eq!(code, Some(FAILED));
    assert!(message.contains("output directory /proc/gradprism/out"), "{message}");
}

/// A directory belongs to the run that made it: what others put there meanwhile is not lost, and of
/// two runs of one name one is refused.
#[test]
fn two_runs_never_share_a_directory() {
    let folder = StudyFolder::new(&fixture("gpt2.pt"), &lines(&synthetic_batch(300, 1)), "");
    let start = || {
        let mut command = gradprism(&["study", "--quiet"]);
        command.arg(folder.path("study.yaml")).arg("--out").arg(folder.path("out"));
        command.stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let runs: Vec<_> = (0..3).map(|_| start()).collect();
    let outputs: Vec<_> = runs.into_iter().map(|run| run.wait_with_output().unwrap()).collect();
    let done = outputs.iter().filter(|output| output.status.code() == Some(0)).count();
    assert_eq!(done, 1, "{:?}", outputs.iter().map(stderr).collect::<Vec<_>>());
    assert_eq!(folder.prompts().len(), 300);
    assert!(!folder.path("out/.partial").exists());
}

#[cfg(unix)]
#[test]
fn links_are_followed_and_unfinished_runs_told() {
    let folder = study(&fixture("gpt2.pt"));
    std::fs::create_dir(folder.path("elsewhere")).unwrap();
    std::os::unix::fs::symlink(folder.path("elsewhere"), folder.path("out")).unwrap();
    assert_eq!(folder.run(&[]).status.code(), Some(0));
    assert!(folder.path("elsewhere/summary.json").exists());
    assert_eq!(folder.run(&["--force"]).status.code(), Some(0));
    assert!(folder.path("out").symlink_metadata().unwrap().is_symlink());

    // One that was killed leaves its part behind, which --force replaces.
    std::fs::create_dir(folder.path("elsewhere/.partial")).unwrap();
    let output = folder.run(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("unfinished run"), "{}", stderr(&output));
    assert_eq!(folder.run(&["--force"]).status.code(), Some(0));

    std::fs::remove_file(folder.path("out")).unwrap();
    std::os::unix::fs::symlink(folder.path("nowhere"), folder.path("out")).unwrap();
    assert!(stderr(&folder.run(&[])).contains("leads nowhere"));
}

#[test]
fn a_failed_run_takes_the_folders_back_that_it_made() {
    let folder = study(&fixture("gpt2.pt"));
    let mut command = gradprism(&["study", "--set", "decomposition.debias=true"]);
    command.args(["--set", "algorithm.preset=rloo", "--set", "algorithm.kl.coef=0"]);
    let output = command
        .arg(folder.path("study.yaml"))
        .arg("--out")
        .arg(folder.path("a/b/out"))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(!folder.path("a").exists());
}

/// Observations that are no integers are not cut to integers in silence.
#[test]
fn fractions_are_no_integer_observations() {
    let line = |number: f64| json!({"group_id": "a", "observations": [[0, 1, number]], "actions": [0], "reward": number});
    let arguments = [
        "--set",
        "policy.kind=step",
        "--set",
        "policy.observation_dtype=int64",
        "--set",
        "algorithm.kl.coef=0",
    ];
    let folder = StudyFolder::new(&fixture("tabular.pt"), &[line(1.0), line(2.5)], "");
    let says = [":2: field `observations`", "expected integers", "found 2.5"];
    assert_refused(&folder, &arguments, FAILED, &says);
    let folder = StudyFolder::new(&fixture("tabular.pt"), &[line(1.0), line(2.0)], "");
    assert_eq!(folder.run(&arguments).status.code(), Some(0));
}

#[test]
fn a_study_that_fails_midway_leaves_the_earlier_run_alone() {
    let folder = study(&fixture("gpt2.pt"));
    assert_eq!(folder.run(&[]).status.code(), Some(0));
    let before = std::fs::read(folder.path("out/prompts.jsonl")).unwrap();
    let setting = "decomposition.debias=true";
    let output = folder.run(&[
        "--force",
        "--set",
        "algorithm.preset=rloo",
        "--set",
        setting,
        "--set",
        "algorithm.kl.coef=0",
    ]);
    assert_eq!(output.status.code(), Some(WRONG_USAGE), "{}", stderr(&output));
    assert!(stderr(&output).contains("expected rollouts of this very policy"));
    assert_eq!(std::fs::read(folder.path("out/prompts.jsonl")).unwrap(), before);
    let names: Vec<_> = std::fs::read_dir(folder.folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(names.len(), 3, "{names:?}");
}

/// With --force a run replaces what its directory holds: nothing that it reads may lie there.
#[test]
fn inputs_in_the_run_directory() {
    for command in ["study", "diagnose", "filter"] {
        let folder = study(&fixture("gpt2.pt"));
        assert_eq!(folder.run(&[]).status.code(), Some(0));
        let rollouts = folder.path("out/rollouts.jsonl");
        std::fs::copy(folder.path("rollouts.jsonl"), &rollouts).unwrap();
        let own = format!("rollouts.path={}", rollouts.display());
        let output = folder.run_command(command, &["--force", "--set", &own]);
        assert_eq!(output.status.code(), Some(FAILED), "{command}");
        assert!(stderr(&output).contains("which this run reads"), "{}", stderr(&output));
        assert!(rollouts.exists() && folder.path("out/prompts.jsonl").exists(), "{command}");
    }
}
