"""Publish a finished run: python recipes/publish.py RUN org/name [--private].

A classifier becomes a repository that plain transformers serves and `LiViTForImageClassification.from_pretrained`
reads back, a pretraining run a stock ViTMAE one. `--timm` publishes the classifier for timm, in a repository of its
own such as org/name-timm. `--folder DIR` writes what would be uploaded and uploads nothing.
"""

import argparse
import sys

from livt_hf.hub import PublishError, prepare_publication, publish


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a finished run")
    parser.add_argument("repo_id", help="org/name on the Hub")
    parser.add_argument("--private", action="store_true", help="create the repository as a private one")
    parser.add_argument("--timm", action="store_true", help="publish timm's form")
    parser.add_argument("--tag", help="git tag for this version, e.g. v1.0")
    parser.add_argument("--license", default="apache-2.0", help="licence of your weights, as the Hub spells it")
    parser.add_argument("--folder", help="write the publication here and upload nothing")
    options = parser.parse_args()
    form = "timm" if options.timm else "transformers"
    try:
        if options.folder:
            where = prepare_publication(
                options.run, options.folder, options.repo_id, license=options.license, form=form
            )
            print(f"nothing uploaded; look at {where}")
            return
        commit = publish(
            options.run,
            options.repo_id,
            private=options.private,
            license=options.license,
            form=form,
            tag=options.tag,
        )
    except (PublishError, ValueError) as error:
        sys.exit(str(error))
    print(f"published: {commit.commit_url}")


if __name__ == "__main__":
    main()
